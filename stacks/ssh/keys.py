"""Public keys that log in to rented machines: what a file of one must hold, and which kinds each cloud takes.

AWS: "Imports the public key from an RSA or ED25519 key pair" (EC2 API reference, ImportKeyPair). Azure: RSA of 2048
bits and more, and ED25519 (learn.microsoft.com, "Detailed steps: Create and manage SSH keys"). Google hands on whatever
the machine's sshd takes.
"""

from __future__ import annotations

import base64
import binascii
import re
import subprocess
from pathlib import Path

from gpuctl.cluster.atomic_write import write_atomic
from gpuctl.cluster.errors import BadInput
from gpuctl.stacks.catalog.instance_types import CloudName
from gpuctl.stacks.state.paths import private_folder, ssh_dir

USUAL = ("id_ed25519.pub", "id_rsa.pub")
"""In ``~/.ssh``, the first that is there. A running agent is not asked: what it holds changes."""
_SUCH_AS = "give a file such as ~/.ssh/id_ed25519.pub"
STANDS_FOR_IT = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAABAgMEBQYHCAkKCwwNDg8QERITFBUWFxgZGhscHR4f gpuctl"
"""In a plan, for the key that ``make`` would make. Nobody has its private part."""
_KIND = re.compile(r"(?:ssh|ecdsa|sk)-[a-z0-9@.-]+")
_TAKEN = {"aws": ("ssh-ed25519", "ssh-rsa"), "azure": ("ssh-ed25519", "ssh-rsa")}
_AZURE_BITS = 2048


def read(path: Path) -> str:
    """The one public key that the file holds, as a line. Raises ``BadInput``."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"--ssh-key {path} cannot be read: {error}", _SUCH_AS) from error
    if "PRIVATE KEY-----" in text or text.startswith("PuTTY-User-Key-File"):
        raise BadInput(f"{path} is a private key", f"give its public key, such as {path.with_suffix('.pub')}")
    if text.lstrip().startswith("---- BEGIN SSH2"):
        raise BadInput(f"{path} is not in OpenSSH's format", f"convert it: ssh-keygen -i -f {path}")
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    if len(lines) > 1:
        raise BadInput(f"{path} holds {len(lines)} keys, but machines take one", _SUCH_AS)
    if not lines:
        raise BadInput(f"{path} is empty", _SUCH_AS)
    (line,) = lines
    words = line.split()
    if not _KIND.fullmatch(words[0]) and any(_KIND.fullmatch(word) for word in words[1:]):
        raise BadInput(f"{path} has options before its key, as in authorized_keys", "leave them out")
    if not _is_whole(words):
        raise BadInput(f"{path} is not a public key", _SUCH_AS)
    return line


def usual() -> str:
    """The user's own; empty where there is none that is usable."""
    for name in USUAL:
        path = Path.home() / ".ssh" / name
        if path.is_file():
            try:
                return read(path)
            except BadInput:
                continue
    return ""


def own() -> Path:
    """The private key that gpuctl makes for a user who has none, ``<state>/ssh/id_ed25519``."""
    return ssh_dir() / "id_ed25519"


def make() -> str:
    """The public key of ``own``, which is made if it is not there; empty where nothing can make it."""
    public = own().with_suffix(".pub")
    try:
        if not own().is_file():
            private_folder(ssh_dir())
            _keygen("-q", "-t", "ed25519", "-N", "", "-C", "gpuctl")
        if not public.is_file():  # ssh-keygen writes it last, and may have been interrupted
            write_atomic(public, _keygen("-y"), mode=0o644)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return read(public)


def _keygen(*words: str) -> bytes:
    """What it prints about the file ``own``."""
    command = ["ssh-keygen", *words, "-f", str(own())]
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=True).stdout


def identity(key: str, path: Path | None) -> str:
    """The file with the private part of the public ``key``, where ssh would not try it by itself: beside ``path``, if
    that was named, or gpuctl's own; empty if there is none, as with keys that an agent or a token holds."""
    if path is not None:
        private = path.expanduser().absolute().with_suffix("")
        return str(private) if path.suffix == ".pub" and private.is_file() else ""
    public = own().with_suffix(".pub")
    return str(own()) if key and public.is_file() and read(public) == key else ""


def refusal(provider: CloudName, key: str) -> tuple[str, str] | None:
    """The reason why the cloud does not take ``key``, and what to do; ``None`` if it takes it."""
    kind, cloud = key.split()[0], {"aws": "AWS", "azure": "Azure", "gcp": "Google Cloud"}[provider]
    other = "create another: ssh-keygen -t ed25519, and name it with --ssh-key"
    if kind not in _TAKEN.get(provider, (kind,)):
        return f"{cloud} takes RSA and ED25519 keys, not {kind}", other
    bits = rsa_bits(key)
    if provider == "azure" and bits is not None and bits < _AZURE_BITS:
        return f"Azure takes RSA keys of {_AZURE_BITS} bits or more, and this one has {bits}", other
    return None


def rsa_bits(key: str) -> int | None:
    """``None`` for other kinds, and for what is no key."""
    parts = _parts(key.split())
    return int.from_bytes(parts[2], "big").bit_length() if len(parts) == 3 and parts[0] == b"ssh-rsa" else None


def _is_whole(words: list[str]) -> bool:
    parts = _parts(words)
    if len(parts) < 2 or parts[0] != words[0].encode():
        return False
    return len(parts[1]) == 32 if words[0] == "ssh-ed25519" else True


def _parts(words: list[str]) -> list[bytes]:
    """The strings that a key's second word is made of (RFC 4253, 6.6); none if it is cut off."""
    try:
        left = base64.b64decode(words[1], validate=True)
    except (IndexError, binascii.Error):
        return []
    found = []
    while left:
        size = int.from_bytes(left[:4], "big")
        if len(left) < 4 + size:
            return []
        found.append(left[4 : 4 + size])
        left = left[4 + size :]
    return found
