"""Machines on a network of their own, whose cables can be pulled: Linux network namespaces on a bridge.

The namespaces have no names and no life beyond their processes, so nothing can be left of them. The switch is one too:
that of whoever uses this module (``unshare --net``, see ``silence``), or another one (see ``tests.e2e.wired``).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.waiting import until

SWITCH = "10.77.0.1"

# Ends with its parent, however that ends: its standard input is closed then.
_S3_SERVER = """
import logging, sys, urllib.request
from moto.server import ThreadedMotoServer
logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer(ip_address="0.0.0.0", port=0, verbose=False)
server.start()
port = server.get_host_and_port()[1]
urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{port}/bench", method="PUT"), timeout=30).read()
print(port, flush=True)
sys.stdin.read()
"""


def is_possible() -> bool:
    """Root, with iproute2 and util-linux, in an environment that lets it make namespaces."""
    if sys.platform != "linux" or os.geteuid() != 0 or not all(map(shutil.which, ("ip", "unshare", "nsenter"))):
        return False
    return subprocess.run(["unshare", "--net", "ip", "link", "add", "switch", "type", "bridge"]).returncode == 0


class Network:
    """The switch and its machines 0, 1, … ``at_switch`` is what a command begins with to run at the switch."""

    def __init__(self, at_switch: Sequence[str] = ()) -> None:
        self._at_switch = list(at_switch)
        self._holders: list[subprocess.Popen[bytes]] = []
        self.at_switch("ip", "link", "set", "lo", "up")
        self.at_switch("ip", "link", "add", "switch", "type", "bridge")
        # Of its own: one that it takes from its ports changes as they come, and a machine that knows the old one does
        # not reach the switch for a minute.
        self.at_switch("ip", "link", "set", "switch", "address", "02:00:00:00:00:01")
        self.at_switch("ip", "addr", "add", f"{SWITCH}/24", "dev", "switch")
        self.at_switch("ip", "link", "set", "switch", "up")

    def add(self) -> int:
        """A machine, plugged in; returns its number."""
        number = len(self._holders)
        holder = namespace()
        self._holders.append(holder)
        peer = ("peer", "name", "eth0", "netns", str(holder.pid))
        self.at_switch("ip", "link", "add", f"port{number}", "type", "veth", *peer)
        self.at_switch("ip", "link", "set", f"port{number}", "master", "switch", "up")
        for command in (f"addr add {self.address(number)}/24 dev eth0", "link set eth0 up", "link set lo up"):
            subprocess.run([*self.inside(number), "ip", *command.split()], check=True)
        return number

    def address(self, number: int) -> str:
        return f"10.77.0.{number + 10}"

    def inside(self, number: int) -> list[str]:
        """What a command begins with to run on that machine."""
        return entering(self._holders[number])

    def at_switch(self, *command: str) -> None:
        subprocess.run([*self._at_switch, *command], check=True)

    def cut(self, number: int) -> None:
        """Pull the cable at the switch: nothing arrives any more, and nobody is told."""
        self.at_switch("ip", "link", "set", f"port{number}", "down")

    def slow_switch(self, number: int, mbit_per_s: int) -> None:
        """What the machine and the switch itself (a server there) send each other passes at no more than that, each
        way. The machine's wires to the other ones stay as they are."""
        for command, device, end in ((self._at_switch, f"port{number}", "src"), (self.inside(number), "eth0", "dst")):
            for rule in _slowed(device, end, mbit_per_s):
                subprocess.run([*command, "tc", *rule.split()], check=True)

    def shape(self, machine: int, mbit: float) -> None:
        """The machine's wire carries no more than that, each way: ``mbit`` 10^6 bits a second of whole frames, of which
        95.6 % are payload of TCP at an MTU of 1500. Call it again to change the rate, also while something is carried.

        Not together with ``slow_switch``. See ``relay`` for a wire that is long.
        """
        rule = f"root {_bucket(mbit)}"
        self.at_switch("tc", *f"qdisc replace dev port{machine} {rule}".split())
        subprocess.run([*self.inside(machine), "tc", *f"qdisc replace dev eth0 {rule}".split()], check=True)

    def hide_switch(self) -> None:
        """Servers at the switch are away: nothing that is sent to them arrives. The machines still reach each other."""
        self.at_switch("ip", "addr", "del", f"{SWITCH}/24", "dev", "switch")

    def show_switch(self) -> None:
        self.at_switch("ip", "addr", "add", f"{SWITCH}/24", "dev", "switch")

    def mend(self, number: int) -> None:
        self.at_switch("ip", "link", "set", f"port{number}", "up")

    def close(self) -> None:
        for holder in self._holders:
            holder.kill()
            holder.wait()


def can_slow_switch() -> bool:
    """Whether ``Network.slow_switch`` is possible as well."""
    return _can(_slowed("lo", "src", 1000))


def can_shape() -> bool:
    """Whether ``Network.shape`` is possible as well."""
    return _can([f"qdisc replace dev lo root {_bucket(1000)}"])


def _can(rules: Sequence[str]) -> bool:
    """Whether ``tc`` and this kernel know them."""
    if not is_possible() or not shutil.which("tc"):
        return False
    commands = " && ".join(f"tc {rule}" for rule in rules)
    return subprocess.run(["unshare", "--net", "sh", "-c", commands], capture_output=True).returncode == 0


def _bucket(mbit: float) -> str:
    """For ``tc``: a token bucket. It holds what passes at once after a pause: 4 ms of the rate, because on a busy
    machine its timer may be that late. What would wait for more than 50 ms is dropped.

    80 KiB are the least: a socket hands down 64 KiB in one piece, which count as 67 KiB with the headers of the frames.
    One that waits when the bucket becomes smaller than that would wait for ever, and all others behind it.
    """
    return f"tbf rate {mbit:g}mbit burst {max(80 << 10, round(mbit * 1e6 / 8 * 0.004))}b latency 50ms"


def _slowed(device: str, end: str, mbit_per_s: int) -> list[str]:
    """For ``tc``: at ``device``, packets whose ``end`` is the switch in a class of their own."""
    return [
        f"qdisc add dev {device} root handle 1: htb default 2",
        f"class add dev {device} parent 1: classid 1:1 htb rate {mbit_per_s}mbit burst 64kb quantum 60000",
        f"class add dev {device} parent 1: classid 1:2 htb rate 100gbit quantum 60000",
        f"filter add dev {device} parent 1: protocol ip u32 match ip {end} {SWITCH}/32 flowid 1:1",
    ]


def namespace() -> subprocess.Popen[bytes]:
    """A process in a network namespace of its own, which lasts as long as the process, and that as long as we do."""
    holder = subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE, start_new_session=True)
    mine = Path("/proc/self/ns/net").readlink()
    until(lambda: Path(f"/proc/{holder.pid}/ns/net").readlink() != mine, "a new network namespace")
    return holder


def entering(holder: subprocess.Popen[bytes]) -> list[str]:
    """What a command begins with to run in the namespace of ``holder``."""
    return ["nsenter", f"--net=/proc/{holder.pid}/ns/net"]


@contextlib.contextmanager
def network(at_switch: Sequence[str] = ()) -> Iterator[Network]:
    made = Network(at_switch)
    try:
        yield made
    finally:
        made.close()


@contextlib.contextmanager
def network_apart() -> Iterator[Network]:
    """One whose switch has a namespace of its own too."""
    switch = namespace()
    try:
        with network(entering(switch)) as made:
            yield made
    finally:
        switch.kill()
        switch.wait()


@contextlib.contextmanager
def s3_bucket(at_switch: Sequence[str] = ()) -> Iterator[str]:
    """URL of a bucket on a real S3 server at the switch. ``at_switch``: see ``Network``."""
    with subprocess.Popen(
        [*at_switch, sys.executable, "-c", _S3_SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as server:
        try:
            assert server.stdout is not None
            port = server.stdout.readline().strip()
            options = f"endpoint=http://{SWITCH}:{port}&region=us-east-1&access_key_id=bench&secret_access_key=bench"
            yield f"s3://bench/cluster?{options}"
        finally:
            server.kill()
