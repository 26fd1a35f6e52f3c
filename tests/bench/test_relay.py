"""The relay of the bench: all that comes arrives at the other end, later, and at any rate."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.bench.relay import WINDOW_BYTES, relay


@contextmanager
def serving(serve: Callable[[socket.socket], object]) -> Iterator[str]:
    """One connection for ``serve``; yields where."""

    def take() -> None:
        with server.accept()[0] as connection:
            serve(connection)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=take)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        thread.join()


def connected(address: str) -> socket.socket:
    host, port = address.split(":")
    return socket.create_connection((host, int(port)))


def read(connection: socket.socket) -> bytes:
    """All, until the stream's end."""
    found = []
    while data := connection.recv(1 << 18):
        found.append(data)
    return b"".join(found)


def test_what_is_sent_arrives_whole_and_an_end_of_one_direction_ends_that_one() -> None:
    payload = bytes(range(256)) * 20_000
    heard = []

    def answer_backwards(connection: socket.socket) -> None:
        heard.append(read(connection))
        connection.sendall(heard[0][::-1])

    with (
        serving(answer_backwards) as address,
        relay(address, delay_ms=20) as relayed,
        connected(relayed) as connection,
    ):
        began = time.monotonic()
        connection.sendall(payload)
        connection.shutdown(socket.SHUT_WR)
        answer = read(connection)
        took_s = time.monotonic() - began
    assert heard == [payload]
    assert answer == payload[::-1]
    assert took_s > 0.040


def test_a_sender_is_told_when_its_receiver_is_gone() -> None:
    with (
        serving(lambda connection: connection.recv(1)) as address,
        relay(address, delay_ms=1) as relayed,
        connected(relayed) as connection,
        pytest.raises(OSError),
    ):
        while True:
            connection.sendall(bytes(1 << 20))


def test_a_sender_that_is_far_ahead_has_to_wait() -> None:
    may_read = threading.Event()
    with (
        serving(lambda connection: may_read.wait() and read(connection)) as address,
        relay(address, delay_ms=1) as relayed,
        connected(relayed) as connection,
    ):
        connection.settimeout(0.5)
        sent = 0
        with pytest.raises(TimeoutError):
            while sent < 4 * WINDOW_BYTES:
                sent += connection.send(bytes(1 << 20))
        may_read.set()
    assert sent > WINDOW_BYTES


@pytest.mark.timing
def test_a_long_wire_is_not_a_slow_one() -> None:
    """Were one piece waited for before the next is taken in, this would take twenty seconds."""
    payload = bytes(50_000_000)
    with (
        serving(read) as address,
        relay(address, delay_ms=100) as relayed,
        connected(relayed) as connection,
    ):
        began = time.monotonic()
        connection.sendall(payload)
        connection.shutdown(socket.SHUT_WR)
        assert read(connection) == b""
        assert 0.2 < time.monotonic() - began < 5
