"""Machines whose wires are slow or long: what a connection between them carries, and how late it arrives."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.bench.network import Network, can_shape, network_apart
from tests.bench.relay import relay
from tests.fakes.stores.serving import started
from tests.waiting import until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timing,
    pytest.mark.skipif(not can_shape(), reason="network namespaces with shaped wires need root, iproute2 and tbf"),
]

_PAYLOAD = 1448 / 1514
"""Of a frame at an MTU of 1500: 14 bytes are Ethernet's, 20 IP's, and 32 TCP's with its time stamps."""

_RECEIVE = """
import socket, sys, time
server = socket.create_server((sys.argv[1], 0))
print(server.getsockname()[1], flush=True)
connection, _ = server.accept()
began, got = time.monotonic(), 0
while data := connection.recv(1 << 18):
    got += len(data)
    now = time.monotonic()
    if now - began >= 0.5:
        print(got * 8 / 1e6 / (now - began), flush=True)
        began, got = now, 0
"""
_SEND = """
import socket, sys
connection = socket.create_connection((sys.argv[1], int(sys.argv[2])))
while True:
    connection.sendall(bytes(1 << 16))
"""
_ECHO = """
import socket, sys
server = socket.create_server((sys.argv[1], 0))
print(server.getsockname()[1], flush=True)
connection, _ = server.accept()
connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
while data := connection.recv(1 << 16):
    connection.sendall(data)
"""
_PING = """
import socket, sys, time
host, port = sys.argv[1].split(":")
connection = socket.create_connection((host, int(port)))
took_s = []
for _ in range(10):
    began = time.perf_counter()
    connection.sendall(b"?")
    connection.recv(1)
    took_s.append(time.perf_counter() - began)
print(min(took_s))
"""


@pytest.fixture(scope="module")
def net() -> Iterator[Network]:
    """Three machines."""
    with network_apart() as made:
        for _ in range(3):
            made.add()
        yield made


@contextmanager
def stream(net: Network, source: int, target: int) -> Iterator[Callable[[], float]]:
    """One connection sends all that it can. Yields what tells the next half second's Mbit/s of payload."""
    receive = [*net.inside(target), sys.executable, "-c", _RECEIVE, net.address(target)]
    with subprocess.Popen(receive, stdout=subprocess.PIPE, text=True) as receiver:
        assert receiver.stdout is not None
        lines = receiver.stdout
        send = [*net.inside(source), sys.executable, "-c", _SEND, net.address(target), next(lines).strip()]
        with subprocess.Popen(send, stderr=subprocess.DEVNULL) as sender:
            try:
                yield lambda: float(next(lines))
            finally:
                sender.kill()
                receiver.kill()


def fastest(rates: Callable[[], float]) -> float:
    """Of six half seconds: on a busy machine, some are slower. The first is left out, in which the bucket was full."""
    rates()
    return max(rates() for _ in range(6))


@pytest.mark.parametrize("mbit", [50, 200, 1000])
def test_a_shaped_wire_carries_its_rate(net: Network, mbit: int) -> None:
    net.shape(0, mbit)
    with stream(net, 0, 1) as rates:
        assert fastest(rates) == pytest.approx(_PAYLOAD * mbit, rel=0.07)


def test_a_shaped_wire_is_as_slow_towards_its_machine_and_others_are_not(net: Network) -> None:
    net.shape(0, 50)
    with stream(net, 1, 0) as rates:
        assert fastest(rates) == pytest.approx(_PAYLOAD * 50, rel=0.07)
    with stream(net, 1, 2) as rates:
        assert fastest(rates) > 200


def test_a_wire_is_shaped_anew_while_it_carries_something(net: Network) -> None:
    net.shape(0, 200)
    with stream(net, 0, 1) as rates:
        assert fastest(rates) == pytest.approx(_PAYLOAD * 200, rel=0.07)
        net.shape(0, 50)
        until(lambda: rates() < 60, "the wire to be slower")
        assert fastest(rates) == pytest.approx(_PAYLOAD * 50, rel=0.07)


@pytest.mark.parametrize("delay_ms", [0, 10, 50])
def test_a_relay_between_two_machines_delays_each_way(net: Network, delay_ms: int) -> None:
    for machine in (0, 1):
        net.shape(machine, 1000)
    echo = [*net.inside(1), sys.executable, "-c", _ECHO, net.address(1)]
    with (
        started(echo, r"^(\d+)$") as port,
        relay(f"{net.address(1)}:{port}", delay_ms, f"{net.address(0)}:0", net.inside(0)) as address,
    ):
        ping = [*net.inside(2), sys.executable, "-c", _PING, address]
        round_trip_s = float(subprocess.run(ping, capture_output=True, check=True).stdout)
    assert 2 * delay_ms / 1000 <= round_trip_s < 2 * delay_ms / 1000 + 0.010
