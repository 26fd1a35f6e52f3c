"""A network of a test's own: a bridge in a network namespace that no file names, so that it ends with its processes.

Whoever starts something in it says so with ``inside``; sockets of this very process get into it with ``within``.
Machines hang on the bridge by ``vb-<name>`` (systemd-nspawn makes that end) and have it as ``host0``; their addresses
come by DHCP.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from tests.machines import dhcp
from tests.paths import ROOT

T = TypeVar("T")

BRIDGE = "br0"
HOST = "10.77.0.1"
"""Address of what is no machine: the user, the bucket, the package indexes."""
METADATA = "169.254.169.254"
_CLONE_NEWNET = 0x40000000
_DIES_WITH_US = ("setpriv", "--pdeathsig", "KILL")


class Network:
    """A context manager: outside of it there is no network."""

    def __enter__(self) -> Network:
        self._holder = subprocess.Popen(
            [*_DIES_WITH_US, "unshare", "--net", "sh", "-c", "echo; exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._holder.stdout is not None
        self._holder.stdout.readline()
        self._doors: list[socket.socket] = []
        self._limited: list[str] = []
        for command in (
            "ip link set lo up",
            # By itself its address is that of one of its ports, and changes when that one goes: then nobody finds it.
            f"ip link add {BRIDGE} address 02:00:00:00:00:01 type bridge",
            f"ip addr add {HOST}/24 dev {BRIDGE}",
            f"ip addr add {METADATA}/32 dev {BRIDGE}",
            f"ip link set {BRIDGE} up",
            "nft add table bridge cuts",
            *(
                f"nft add chain bridge cuts {hook} {{ type filter hook {hook} priority 0 ; }}"
                for hook in ("forward", "input", "output")
            ),
        ):
            self.run(*command.split())
        self._dhcp = self.within(lambda: dhcp.listening(BRIDGE))
        dhcp.serve(self._dhcp, HOST)
        return self

    def __exit__(self, *_: object) -> None:
        for door in (*self._doors, self._dhcp):
            door.close()
        self._holder.kill()
        self._holder.communicate()

    @property
    def path(self) -> Path:
        """The namespace, as long as its holder lives."""
        return Path(f"/proc/{self._holder.pid}/ns/net")

    def inside(self, *command: str) -> list[str]:
        """``command``, to be run in the network; ends with this process."""
        return [*_DIES_WITH_US, "nsenter", f"--net={self.path}", "--", *command]

    def run(self, *command: str) -> str:
        return subprocess.run(
            self.inside(*command), check=True, timeout=20, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
        ).stdout

    def within(self, make: Callable[[], T]) -> T:
        """What ``make`` returns, run by a thread in the network: a socket stays where it was made."""
        made: list[T] = []

        def enter() -> None:
            self._enter()
            made.append(make())

        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
        return made[0]

    def door(self, port: int) -> int:
        """A port on this machine's loopback that leads to ``port`` of ``HOST``."""
        listener = socket.create_server(("127.0.0.1", 0))
        self._doors.append(listener)
        threading.Thread(target=self._keep_door, args=(listener, port), daemon=True).start()
        return int(listener.getsockname()[1])

    # -- disturbances -------------------------------------------------------------------------------------------------

    def cut(self, one: str, other: str) -> None:
        """No packet passes between the two addresses from now on. What is lost is not refused."""
        for here, there in ((one, other), (other, one)):
            for hook in ("forward", "input", "output"):
                self.run(*f"nft add rule bridge cuts {hook} ip saddr {here} ip daddr {there} drop".split())

    def mend(self) -> None:
        """Undo every ``cut`` and ``limit``."""
        for hook in ("forward", "input", "output"):
            self.run(*f"nft flush chain bridge cuts {hook}".split())
        for port in self._limited:
            with contextlib.suppress(subprocess.CalledProcessError):  # the machine is gone
                self.run(*f"tc qdisc del dev {port} root".split())
        self._limited.clear()

    def unplug(self, machine: str) -> None:
        """Its cable is out: a power loss says goodbye to nobody."""
        self.run(*f"ip link set {port_of(machine)} down".split())

    def plug(self, machine: str) -> None:
        self.run(*f"ip link set {port_of(machine)} up".split())

    def forget(self, machine: str) -> None:
        """The kernel takes its cable away when it comes to it; until then no other machine can have that name."""
        with contextlib.suppress(subprocess.CalledProcessError):  # it has come to it
            self.run(*f"ip link delete {port_of(machine)}".split())

    def limit(self, machine: str, mbit_per_s: float) -> None:
        """What reaches the machine comes no faster than this."""
        shape = f"tbf rate {mbit_per_s}mbit burst 16kb latency 400ms"
        self.run(*f"tc qdisc replace dev {port_of(machine)} root {shape}".split())
        self._limited.append(port_of(machine))

    # -- doors --------------------------------------------------------------------------------------------------------

    def _enter(self) -> None:
        """This thread alone. Python has ``os.setns`` from 3.12 on."""
        with self.path.open() as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "cannot enter the network")

    def _keep_door(self, listener: socket.socket, port: int) -> None:
        self._enter()
        with contextlib.suppress(OSError):  # closed
            while True:
                caller, _ = listener.accept()
                threading.Thread(target=_join, args=(caller, port, self._enter), daemon=True).start()


def port_of(machine: str) -> str:
    """systemd-nspawn's name for the bridge's end of the machine's cable."""
    return f"vb-{machine}"


def _join(caller: socket.socket, port: int, enter: Callable[[], None]) -> None:
    with caller, contextlib.suppress(OSError):
        enter()
        with socket.create_connection((HOST, port), timeout=10) as server:
            server.settimeout(None)
            back = threading.Thread(target=_pump, args=(server, caller), daemon=True)
            back.start()
            _pump(caller, server)
            back.join()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def program(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """A server of the network, killed at the end."""
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=os.environ
    ) as process:
        try:
            yield process
        finally:
            process.kill()
