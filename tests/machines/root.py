"""The file systems that machines boot from: a small Debian, and on top of it gpuctl's packages. Made once, then cached.

Layers for an overlay, which nobody writes into again::

    ~/.cache/gpuctl-tests/root-<digest>        what mmdebstrap makes of PACKAGES, and SETTINGS
    ~/.cache/gpuctl-tests/wheels-<digest>      all that gpuctl needs there, as this machine's package index has it
    ~/.cache/gpuctl-tests/venv-<digest>        those installed in /opt/gpuctl/venv
    ~/.cache/gpuctl-tests/plain-<digest>       a Debian for an image or a chroot: no init system, no network
    ~/.cache/gpuctl-tests/debs-<digest>        what the boot's steps ask of a Debian, as a repository without a network
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

from gpuctl.cluster import distribution
from tests import environment
from tests.machines.chroot import Chroot
from tests.paths import ROOT

SUITE, PYTHON = "bookworm", "3.11"
VENV = "/opt/gpuctl/venv"
EXTRAS = ("demo",)
"""Of gpuctl, on machines: what the examples need too."""

PACKAGES = (
    *("systemd-sysv", "dbus", "libpam-systemd", "udev", "kmod", "login", "procps", "netbase", "sudo"),
    *("cloud-init", "openssh-server", "rsync", "tmux", "curl", "ca-certificates", "iproute2", "iputils-ping"),
    *("python3", "python3-venv", "gpg", "gpg-agent", "podman", "runc"),
)

SETTINGS = {
    # The network comes from the image, as no metadata service can be asked before there is one.
    "etc/cloud/cloud.cfg.d/90-machine.cfg": "network: {config: disabled}\nlocale: false\n",
    "etc/systemd/network/10-host0.network": "",  # a machine's own (see ``machine``)
    "etc/fstab": "",
    "etc/machine-id": "",  # each machine makes its own
    "etc/resolv.conf": "options timeout:1 attempts:1\n",  # nobody answers here
    # A machine of one test needs no history, and two cores have better things to do.
    "etc/systemd/journald.conf.d/small.conf": "[Journal]\nStorage=volatile\nRuntimeMaxUse=8M\n",
}
MASKED = ("systemd-firstboot.service", *(f"podman{part}.service" for part in ("", "-auto-update", "-restart")))
ENABLED = ("systemd-networkd.service", "ssh.service")


_DOWNLOAD = """
    set -e
    cat /run/resolv.conf > /etc/resolv.conf
    apt-get -q update
    for name; do shift; ! apt-cache show --quiet=2 "$name" > /dev/null 2>&1 || set -- "$@" "$name"; done
    set -- -o Dir::Cache::archives=/debs -o APT::Sandbox::User= --no-install-recommends --download-only install "$@"
    apt-get -q -y "$@"
    rm -rf /debs/lock /debs/partial
"""


class CannotMake(Exception):
    """What this machine lacks for making the file systems; the tests skip with it."""


def debian(suite: str = SUITE) -> Path:
    """The layer with Debian in it. Raises ``CannotMake``."""

    def make(folder: Path) -> None:
        _bootstrap(suite, PACKAGES, folder)
        for name, text in SETTINGS.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            path.write_text(text)
        for action, units in (("mask", MASKED), ("enable", ENABLED)):
            _run(["systemctl", f"--root={folder}", action, *units], timeout_s=60)
        for key in (folder / "etc/ssh").glob("ssh_host_*"):  # cloud-init makes each machine its own
            key.unlink()

    return _cached("root", repr((suite, PACKAGES, SETTINGS, MASKED, ENABLED)), make)


def plain(suite: str, *packages: str) -> Path:
    """A Debian of nothing but what each has, and ``packages``. Raises ``CannotMake``."""
    return _cached("plain", repr((suite, packages)), lambda folder: _bootstrap(suite, packages, folder))


def debs(below: Path, wanted: Sequence[str]) -> Path:
    """A flat repository for the Debian ``below``: of ``wanted``, those that it has, and all that they depend on there.
    Raises ``CannotMake``."""

    def make(folder: Path) -> None:
        with tempfile.TemporaryDirectory() as place:
            chroot = Chroot(Path(place), [below], {"/debs": folder, "/run/resolv.conf": Path("/etc/resolv.conf")})
            try:
                chroot.run("sh", "-c", _DOWNLOAD, "sh", *wanted, network=True, timeout_s=900)
            except subprocess.SubprocessError as error:
                raise CannotMake(f"apt-get failed: {getattr(error, 'stdout', error)}") from error
        entries = []
        for path in sorted(folder.glob("*.deb")):
            control = subprocess.run(["dpkg-deb", "--field", path], check=True, timeout=60, stdout=subprocess.PIPE)
            data = path.read_bytes()
            digest = hashlib.sha256(data).hexdigest()
            entries.append(f"{control.stdout.decode()}Filename: ./{path.name}\nSize: {len(data)}\nSHA256: {digest}\n")
        (folder / "Packages").write_text("\n".join(entries))

    return _cached("debs", repr((below.name, tuple(wanted), _DOWNLOAD)), make)


def wheels(python: str = PYTHON, extras: Sequence[str] = ("train", *EXTRAS)) -> Path:
    """A folder with a wheel of each package that gpuctl needs on a node. Raises ``CannotMake``."""
    needed = _needed(extras)

    def make(folder: Path) -> None:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(folder), "--only-binary=:all:"]
        _run([*pip, "--python-version", python, "-c", str(ROOT / "constraints.txt"), *needed], timeout_s=1500)

    return _cached("wheels", repr((python, needed, (ROOT / "constraints.txt").read_text())), make)


def furnished() -> list[Path]:
    """Layers, the topmost first, of a machine that has all packages but gpuctl itself. Raises ``CannotMake``."""
    below, source = debian(), wheels()

    def make(folder: Path) -> None:
        script = f"""
            set -e
            mount -t tmpfs none "$1"
            mkdir "$1/work" "$1/merged"
            mkdir "$2/upper" "$2/work"
            mount -t overlay overlay -o "lowerdir=$3,upperdir=$2/upper,workdir=$2/work" "$1/merged"
            mkdir "$1/merged/wheels"
            mount --bind "$4" "$1/merged/wheels"
            mount -t proc proc "$1/merged/proc"
            chroot "$1/merged" python3 -m venv {VENV}
            chroot "$1/merged" {VENV}/bin/pip install --quiet --no-index --find-links /wheels {shlex.join(_needed())}
            umount "$1/merged/wheels" "$1/merged/proc"
            rmdir "$1/merged/wheels"
        """
        with tempfile.TemporaryDirectory() as place:
            args = [place, str(folder), str(below), str(source)]
            try:
                _run(["unshare", "--mount", "sh", "-c", script, "sh", *args], timeout_s=900)
            except CannotMake as error:  # nothing that a machine may lack: it has all of it by now
                raise AssertionError(str(error)) from error
        shutil.rmtree(folder / "work")

    return [_cached("venv", f"{below.name} {source.name} {VENV}", make) / "upper", below]


def _bootstrap(suite: str, packages: Sequence[str], folder: Path) -> None:
    _run(
        ["mmdebstrap", "--variant=minbase", "--mode=root", f"--include={','.join(packages)}"]
        + ["--aptopt=Acquire::Languages none"]
        + [f"--dpkgopt=path-exclude=/usr/share/{part}/*" for part in ("doc", "man", "locale", "info")]
        + [suite, str(folder)],
        timeout_s=900,
    )


def _needed(extras: Sequence[str] = ("train", *EXTRAS)) -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    more = [need for extra in extras for need in project["optional-dependencies"][extra]]
    own = f"{distribution.NAME}["
    return sorted({need for need in (*project["dependencies"], *more) if not need.startswith(own)})


def _cached(kind: str, recipe: str, make: Callable[[Path], None]) -> Path:
    """The folder that ``make`` filled when this recipe was new."""
    cache = environment.cache()
    cache.mkdir(parents=True, exist_ok=True)
    folder = cache / f"{kind}-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"
    with (cache / f"{kind}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():
            return folder
        partial = cache / f"{folder.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(mode=0o755)
        make(partial)
        partial.rename(folder)
    return folder


def _run(command: list[str], timeout_s: float) -> None:
    # make's own, which name a file of the folder that it works in.
    env = {name: value for name, value in os.environ.items() if not name.endswith("_CONSTRAINT")}
    try:
        subprocess.run(
            command,
            check=True,
            env=env,
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    except subprocess.CalledProcessError as error:
        last = (error.stdout or "").strip().splitlines()[-1:] or ["no output"]
        raise CannotMake(f"{command[0]} failed: {last[0]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotMake(f"{command[0]} failed: {error}") from error
