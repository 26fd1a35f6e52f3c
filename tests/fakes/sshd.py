"""A real sshd on loopback: its port chosen by the kernel, its keys made for the test, and whoever runs it logs in.

The listening socket is ours, and each connection gets an sshd of its own (``sshd -i``): no port is free for a moment.

``python -m tests.fakes.sshd FOLDER IDENTITY ADDRESS PORT NODE`` serves until its standard input ends, such as in a
network namespace, and prints the host key; sessions have ``GPUCTL_TEST_NODE``.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from gpuctl.cluster.network.addresses import family_of
from tests.waiting import PATIENCE_S

_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
SSHD = shutil.which("sshd", path=_PATH)


@dataclass
class Sshd:
    port: int
    folder: Path
    host_key: str
    """As a line of ``ssh_host_*_key.pub``."""
    identity: Path
    """Private key that may log in."""
    connections: int = 0
    _running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def user(self) -> str:
        return getpass.getuser()

    def cut(self) -> None:
        """Every connection breaks."""
        for process in self._running:
            process.terminate()
            process.wait(PATIENCE_S)

    def wait_until_all_left(self) -> None:
        for process in self._running:
            process.wait(PATIENCE_S)


@contextlib.contextmanager
def serving(
    folder: Path,
    *,
    identity: Path | None = None,
    address: str = "127.0.0.1",
    port: int = 0,
    env: Mapping[str, str] | None = None,
    options: tuple[str, ...] = (),
) -> Iterator[Sshd]:
    """``identity``: a key that exists, else one is made. ``port``: where that of the kernel's choice will not do, in a
    network of the test's own. ``env``: what each session finds in its environment."""
    if SSHD is None:
        pytest.skip("no sshd here: apt-get install openssh-server")
    folder.mkdir(parents=True, exist_ok=True)
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    identity = identity or make_key(folder / "id")
    host_key = make_key(folder / "host_key")
    config = folder / "sshd_config"
    # A home of its own: what the tester's shell does as it starts is not to be seen in what a session prints.
    session = {"HOME": str(folder), "PATH": _PATH, **(env or {})}
    setting = " ".join(f'"{name}={value}"' for name, value in session.items())
    lines = (
        f"HostKey {host_key}",
        f"AuthorizedKeysFile {identity}.pub",
        "StrictModes no",
        "UsePAM no",
        "PasswordAuthentication no",
        "KbdInteractiveAuthentication no",
        "PermitRootLogin yes",
        "PrintMotd no",
        "Subsystem sftp internal-sftp",
        f"SetEnv {setting}",
        *options,
    )
    config.write_text("".join(f"{line}\n" for line in lines))
    listener = socket.create_server((address, port), family=family_of(address))
    server = Sshd(listener.getsockname()[1], folder, host_key.with_suffix(".pub").read_text().strip(), identity)
    threading.Thread(target=_accept, args=(server, listener, config), daemon=True).start()
    try:
        yield server
    finally:
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        server.cut()


def make_key(path: Path) -> Path:
    if not shutil.which("ssh-keygen"):
        pytest.skip("no ssh-keygen here: apt-get install openssh-client")
    path.unlink(missing_ok=True)
    command = ("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "of a test", "-f", str(path))
    subprocess.run(command, check=True, timeout=PATIENCE_S, stdin=subprocess.DEVNULL)
    return path


def _accept(server: Sshd, listener: socket.socket, config: Path) -> None:
    assert SSHD is not None
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection, (server.folder / "sshd.log").open("ab") as log:
            server.connections += 1
            command, socket_ = (SSHD, "-i", "-e", "-f", str(config)), connection.fileno()
            server._running.append(subprocess.Popen(command, stdin=socket_, stdout=socket_, stderr=log))


def _main(folder: str, identity: str, address: str, port: str, node: str) -> None:
    env = {"GPUCTL_TEST_NODE": node}
    with serving(Path(folder), identity=Path(identity), address=address, port=int(port), env=env) as server:
        print(server.host_key, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    _main(*sys.argv[1:])
