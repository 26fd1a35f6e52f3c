"""A machine: Debian with its own init system, file system, address and processes, and a power switch.

systemd-nspawn runs it on an overlay, in namespaces of the machine's own: what is mounted there ends with its processes,
and they with the first of them, which ends with the tests, however those end.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from tests.machines.dhcp import mac_of
from tests.machines.network import Network

_CGROUPS = Path("/sys/fs/cgroup")
_REBOOTED = 133
_OF_ITS_OWN = ("unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child", "--mount-proc")
_ENV = ("env", "-i", "HOME=/root", "LANG=C.UTF-8", "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")

_LIFE = f"""
    set -e
    machine="$1" folder="$2" layers="$3" groups="$4"
    shift 4
    for group in $groups; do
        mkdir -p "$group"
        echo $$ > "$group/cgroup.procs"
    done
    mount -t overlay overlay -o "lowerdir=$layers,upperdir=$folder/upper,workdir=$folder/work" "$folder/merged"
    while :; do
        code=0
        systemd-nspawn --quiet --boot --register=no --keep-unit --machine="$machine" \\
            --directory="$folder/merged" --network-bridge=br0 --console=pipe --resolv-conf=off --timezone=off \\
            --link-journal=no "$@" || code=$?
        test $code -eq {_REBOOTED} || exit $code
    done
"""


class Machine:
    """``files`` are written before it boots, by path. Not on until ``switch_on``."""

    def __init__(
        self,
        network: Network,
        folder: Path,
        name: str,
        address: str,
        layers: Sequence[Path],
        files: Mapping[str, str],
        disk_mb: int = 0,
    ) -> None:
        """``disk_mb``: size of a small disk for gpuctl alone, that a test can fill."""
        self.name = name
        self.address = address
        self._network = network
        self._folder = folder
        self._layers = layers
        self._options = [f"--tmpfs=/var/lib/gpuctl:size={disk_mb}m,mode=755"] if disk_mb else []
        self._groups = [base / "gpuctl-tests" / f"{os.getpid()}-{name}" for base in _hierarchies()]
        self._life: subprocess.Popen[bytes] | None = None
        # Containers want a file system of their own: an overlay on an overlay there is none.
        self._options.append(f"--bind={folder}/containers:/var/lib/containers")
        for part in ("upper", "work", "merged", "containers"):
            (folder / part).mkdir(parents=True)
        for path, text in {**_network_files(name, address), **files}.items():
            target = folder / "upper" / path.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
            if text.startswith("#!"):
                target.chmod(0o755)

    def switch_on(self) -> None:
        layers = ":".join(str(layer) for layer in self._layers)
        groups = " ".join(str(group) for group in self._groups)
        script = ["sh", "-c", _LIFE, "machine", self.name, str(self._folder), layers, groups, *self._options]
        with (self._folder / "console").open("ab") as console:
            self._life = subprocess.Popen(
                self._network.inside(*_OF_ITS_OWN, *script),
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
            )

    @property
    def is_on(self) -> bool:
        return self._life is not None and self._life.poll() is None

    @property
    def leader(self) -> int:
        """Its init process, as we see it; 0 before there is one, and between its end and a reboot."""
        if self._life is None:
            return 0
        with contextlib.suppress(psutil.Error, OSError):
            for process in psutil.Process(self._life.pid).children(recursive=True):
                status = Path(f"/proc/{process.pid}/status").read_text()
                ids = next(line.split()[1:] for line in status.splitlines() if line.startswith("NSpid:"))
                if len(ids) > 2 and ids[-1] == "1":  # in our namespace, nspawn's, its own
                    return process.pid
        return 0

    def processes(self) -> list[psutil.Process]:
        """Everything that runs on it."""
        leader = self.leader
        if not leader:
            return []
        home = Path(f"/proc/{leader}/ns/pid").readlink()
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError):
                if Path(f"/proc/{process.pid}/ns/pid").readlink() == home:
                    found.append(process)
        return found

    # -- at its keyboard ----------------------------------------------------------------------------------------------

    def command(self, *command: str) -> list[str]:
        """``command``, to be run on the machine by its root."""
        leader = self.leader
        if not leader:
            raise OSError(f"{self.name} is off")
        return ["nsenter", f"--target={leader}", "--all", "--", *_ENV, *command]

    def run(self, *command: str, check: bool = True, timeout_s: float = 30) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*command),
            check=check,
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )

    def read(self, path: str) -> str:
        """A file, also after the machine's end; empty where there is none."""
        if self.leader:
            return self.run("sh", "-c", 'test ! -e "$1" || cat "$1"', "sh", path, check=False).stdout
        with contextlib.suppress(OSError):
            return (self._folder / "upper" / path.lstrip("/")).read_text(errors="replace")
        return ""

    def said(self) -> str:
        """The ends of its logs, for whoever wants to know why a test failed."""
        lines = self.read("/var/log/gpuctl-boot.log").splitlines() or self.read("/var/log/cloud-init.log").splitlines()
        short = [line[:200] for line in lines if "already satisfied" not in line]
        parts = [f"--- {self.name}: log of its boot", *short[-10:]]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            journal = self.run("journalctl", "--no-pager", "-o", "cat", "-n", "50", "-u", "gpuctl*", check=False).stdout
            parts.append(f"--- {self.name}: journal of gpuctl\n{journal}")
        return "\n".join(parts)

    # -- at its power switch ------------------------------------------------------------------------------------------

    def lose_power(self) -> None:
        """Everything stops at once, and nobody is told: no connection is closed."""
        if self.leader:
            with contextlib.suppress(subprocess.CalledProcessError):
                self._network.unplug(self.name)
        self._kill()

    def freeze(self) -> None:
        """It does nothing from now on, its network included, and notices nothing."""
        self._network.unplug(self.name)
        self._signal_all(signal.SIGSTOP, psutil.STATUS_STOPPED)

    def thaw(self) -> None:
        self._network.plug(self.name)
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.resume()

    def await_end(self, timeout_s: float = 60.0) -> None:
        """Until it has powered off by itself."""
        assert self._life is not None
        self._life.wait(timeout_s)

    def discard(self) -> None:
        """Power off, and nothing of it is left. Raises ``AssertionError`` where something is."""
        self._kill()
        deadline = time.monotonic() + 10
        for group in self._groups:
            while not _remove(group):  # busy until its last process is gone
                assert time.monotonic() < deadline, f"processes of {self.name} live on in {group}"
        shutil.rmtree(self._folder)  # fails where something is still mounted

    def _kill(self) -> None:
        if self._life is None:
            return
        everything = self.processes()
        with contextlib.suppress(psutil.NoSuchProcess):
            everything += psutil.Process(self._life.pid).children(recursive=True)
        self._life.kill()
        self._life.wait(20)
        _, alive = psutil.wait_procs(everything, timeout=20)
        assert not alive, f"{self.name} is off, and yet there live {alive}"
        self._network.forget(self.name)

    def _signal_all(self, number: signal.Signals, until: str) -> None:
        """Again for those that were just being born."""
        deadline = time.monotonic() + 10
        while moving := [p for p in self.processes() if _status(p) not in (until, psutil.STATUS_ZOMBIE, "")]:
            for process in moving:
                with contextlib.suppress(psutil.Error):
                    process.send_signal(number)
            assert time.monotonic() < deadline, f"{moving} do not heed {number.name}"


def sweep() -> None:
    """The empty groups that a killed run of the tests has left."""
    for base in _hierarchies():
        for group in (base / "gpuctl-tests").glob("*-*"):
            if not psutil.pid_exists(int(group.name.partition("-")[0])):
                _remove(group)


def _remove(group: Path) -> bool:
    with contextlib.suppress(OSError):
        for below in sorted(group.rglob("*"), key=lambda path: -len(path.parts)):
            if below.is_dir():
                below.rmdir()
        group.rmdir()
    return not group.exists()


def _status(process: psutil.Process) -> str:
    try:
        return str(process.status())
    except psutil.Error:
        return ""


def _network_files(name: str, address: str) -> dict[str, str]:
    return {
        "/etc/hostname": f"{name}\n",
        "/etc/hosts": f"127.0.0.1 localhost\n{address} {name}\n",
        "/etc/systemd/network/10-host0.network": (
            f"[Match]\nName=host0\n[Link]\nMACAddress={mac_of(address)}\n[Network]\nDHCP=ipv4\n"
            # Else a machine that was frozen wakes to a cable out and in again, which costs it now and then its route.
            "LinkLocalAddressing=no\nIPv6AcceptRA=no\nIgnoreCarrierLoss=yes\n"
        ),
    }


def _hierarchies() -> list[Path]:
    """Where systemd keeps its groups: two systemds in one would end each other's processes."""
    mixed = [_CGROUPS / "systemd", _CGROUPS / "unified"]
    return [base for base in mixed if base.exists()] or [_CGROUPS]
