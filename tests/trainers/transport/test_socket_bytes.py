"""Bytes at the sockets: of connections on loopback, and of a process group of gloo's."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from gpuctl.cluster.errors import GpuctlError
from gpuctl.trainers.transport.socket_bytes import SocketBytes
from tests.bench.network import can_shape, network_apart
from tests.fakes.stores.serving import started
from tests.trainers import ranks
from tests.trainers.rank_scripts.collectives import all_reduced_and_dropped

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts what a socket carries")
PAYLOAD = bytes(300_000)


@pytest.fixture
def sockets() -> Iterator[ExitStack]:
    """Closes them."""
    with ExitStack() as stack:
        yield stack


def pair(sockets: ExitStack, address: str = "127.0.0.1") -> tuple[socket.socket, socket.socket]:
    """Two ends of a connection."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as server:
        one = sockets.enter_context(socket.create_connection(server.getsockname()[:2]))
        other, _ = server.accept()
    return one, sockets.enter_context(other)


def carry(one: socket.socket, other: socket.socket, payload: bytes = PAYLOAD) -> None:
    sending = threading.Thread(target=one.sendall, args=(payload,))
    sending.start()
    left = len(payload)
    while left:
        left -= len(other.recv(left))
    sending.join()


def test_both_ends_of_a_connection_count_their_payload_and_nothing_else(sockets: ExitStack) -> None:
    one, other = pair(sockets)
    counter = SocketBytes()
    before = counter.read()
    carry(one, other)
    carry(other, one, PAYLOAD[:1000])
    traffic = counter.read() - before
    assert (traffic.sent, traffic.received) == (301_000, 301_000)


def test_ipv6_counts_too(sockets: ExitStack) -> None:
    try:
        one, other = pair(sockets, "::1")
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    counter = SocketBytes()
    before = counter.read()
    carry(one, other)
    assert (counter.read() - before).sent == len(PAYLOAD)


def test_only_this_process_counts() -> None:
    """The other end is another process's."""
    counter = SocketBytes()
    before = counter.read()
    with socket.create_server(("127.0.0.1", 0)) as server:
        sends = f"import socket; socket.create_connection({server.getsockname()}).sendall(bytes(300_000))"
        with subprocess.Popen([sys.executable, "-c", sends]), server.accept()[0] as connection:
            while connection.recv(1 << 16):
                pass
            traffic = counter.read() - before
    assert (traffic.sent, traffic.received) == (0, 300_000 + 1)  # the end of the stream


def test_a_socket_that_was_closed_keeps_what_it_had_carried_at_the_last_read(sockets: ExitStack) -> None:
    one, other = pair(sockets)
    counter = SocketBytes()
    before = counter.read()
    carry(one, other)
    assert counter.read().sent - before.sent == 300_000
    carry(one, other, PAYLOAD[:5000])  # which nobody sees
    one.close()
    other.close()
    assert [counter.read().sent - before.sent for _ in range(2)] == [300_000, 300_000]


def test_a_new_socket_under_an_old_number_is_another_one(sockets: ExitStack) -> None:
    one, other = pair(sockets)
    carry(one, other)
    counter = SocketBytes()
    before = counter.read()
    numbers = {one.fileno(), other.fileno()}
    one.close()
    other.close()
    one, other = pair(sockets)
    assert numbers & {one.fileno(), other.fileno()}
    carry(one, other, PAYLOAD[:7000])
    assert counter.read().sent - before.sent == 7000


def test_a_socket_with_two_descriptors_counts_once(sockets: ExitStack) -> None:
    one, other = pair(sockets)
    sockets.enter_context(one.dup())
    counter = SocketBytes()
    before = counter.read()
    carry(one, other)
    assert (counter.read() - before).sent == len(PAYLOAD)


def test_other_files_and_sockets_are_let_be(sockets: ExitStack) -> None:
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        for end in socket.socketpair(socket.AF_UNIX, kind):
            sockets.enter_context(end).setblocking(False)
    datagrams = sockets.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    datagrams.connect(("127.0.0.1", 9))
    counter = SocketBytes()
    before = counter.read()
    datagrams.send(b"none")
    assert counter.read() == before
    datagrams.getsockname()  # still open


_SEND_3_MB = """
import json, socket, sys
from dataclasses import asdict
from gpuctl.trainers.transport.socket_bytes import SocketBytes
connection = socket.create_connection((sys.argv[1], int(sys.argv[2])))
connection.sendall(bytes(3_000_000))
connection.shutdown(socket.SHUT_WR)
connection.recv(1)  # the other end has all
print(json.dumps(asdict(SocketBytes().read())))
"""
_RECEIVE = """
import socket, sys
server = socket.create_server((sys.argv[1], 0))
print(server.getsockname()[1], flush=True)
connection, _ = server.accept()
while connection.recv(1 << 16):
    pass
"""


@pytest.mark.slow
@pytest.mark.skipif(not can_shape(), reason="network namespaces with shaped wires need root, iproute2 and tbf")
def test_what_was_lost_and_sent_again_is_told_apart() -> None:
    """On a wire of 20 Mbit/s, towards which a sender that does not know it sends too much."""
    with network_apart() as net:
        sender, receiver = net.add(), net.add()
        net.shape(receiver, 20)
        with started([*net.inside(receiver), sys.executable, "-c", _RECEIVE, net.address(receiver)], r"(\d+)") as port:
            send = [*net.inside(sender), sys.executable, "-c", _SEND_3_MB, net.address(receiver), port]
            told = json.loads(subprocess.run(send, check=True, capture_output=True).stdout)
    assert told["sent"] == 3_000_000 and told["retransmitted"] > 0


@pytest.mark.timing
def test_fifty_sockets_are_read_within_two_milliseconds_beside_a_busy_thread(sockets: ExitStack) -> None:
    for _ in range(25):
        pair(sockets)
    counter = SocketBytes()
    done = threading.Event()

    def busy() -> None:
        while not done.is_set():
            pass

    thread = threading.Thread(target=busy)
    thread.start()
    took_s = []
    for _ in range(50):
        began = time.perf_counter()
        counter.read()
        took_s.append(time.perf_counter() - began)
    done.set()
    thread.join()
    assert sorted(took_s)[len(took_s) // 2] < 0.002


def test_elsewhere_it_says_that_it_needs_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(GpuctlError, match="on Linux only, and this is darwin"):
        SocketBytes()


def test_an_all_reduce_of_16_mb_over_four_ranks_sends_24_mb_from_each_and_a_dropped_group_still_counts() -> None:
    for rank, (traffic, total, total_later) in enumerate(ranks.run(4, all_reduced_and_dropped)):
        assert traffic.sent == pytest.approx(24e6, rel=0.02), f"rank {rank}"
        assert traffic.received == pytest.approx(24e6, rel=0.02), f"rank {rank}"
        assert total_later == pytest.approx(total, rel=0.001), f"rank {rank}"
