"""A wire that is long: a relay for TCP that hands everything on a while later, each way, at any rate.

    python -m tests.bench.relay 10.77.0.10:0 10.77.0.11:4000 20

listens on the first address, prints its port, and passes what comes on to the second one and back, 20 ms later each.
It ends with its standard input. Linux can delay packets itself (netem), but not every kernel was built with that.
Here a connection opens at once, and each end's TCP sees the short way to the relay: only what is said is late.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence

from tests.fakes.stores.serving import started

_READ_BYTES = 1 << 18
WINDOW_BYTES = 64 << 20
"""On their way, of one connection and direction: as much as a link of 5 Gbit/s holds in 100 ms. A sender that is ahead
of its receiver by more has to wait."""


@contextlib.contextmanager
def relay(to: str, delay_ms: float, listen: str = "127.0.0.1:0", inside: Sequence[str] = ()) -> Iterator[str]:
    """Address and port of a relay to ``to``, that delays by ``delay_ms`` each way. All as ``HOST:PORT``; port 0 of
    ``listen`` is one that is free. ``inside``: what a command begins with to run where it listens (``Network.inside``).
    """
    command = [*inside, sys.executable, "-m", "tests.bench.relay", listen, to, str(delay_ms)]
    with started(command, r"^(\d+)$") as port:
        yield f"{listen.rpartition(':')[0]}:{port}"


class _Wire:
    """One direction of a connection: what one thread takes in, another hands out when it is due."""

    def __init__(self, source: socket.socket, sink: socket.socket, delay_s: float) -> None:
        self._source, self._sink, self._delay_s = source, sink, delay_s
        self._under_way: deque[tuple[float, bytes]] = deque()
        """When it is due at the other end, and what. Empty bytes are the end of the stream."""
        self._bytes = 0
        self._changed = threading.Condition()
        self._is_broken = False

    def take_in(self) -> None:
        data = b"more"
        while data:
            try:
                data = self._source.recv(_READ_BYTES)
            except OSError:  # reset, which the other end takes for an end
                data = b""
            with self._changed:
                self._changed.wait_for(lambda: self._bytes < WINDOW_BYTES or self._is_broken)
                self._under_way.append((time.monotonic() + self._delay_s, data))
                self._bytes += len(data)
                self._changed.notify()

    def hand_out(self) -> None:
        try:
            while data := self._next():
                self._sink.sendall(data)
                with self._changed:
                    self._bytes -= len(data)
                    self._changed.notify()
            self._sink.shutdown(socket.SHUT_WR)
        except OSError:  # nobody hears it any more, so the sender is not to go on
            with self._changed:
                self._is_broken = True
                self._changed.notify()
            for end in (self._source, self._sink):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def _next(self) -> bytes:
        with self._changed:
            self._changed.wait_for(lambda: self._under_way)
            due, data = self._under_way.popleft()
        time.sleep(max(0.0, due - time.monotonic()))
        return data


def _pass_on(near: socket.socket, to: tuple[str, int], delay_s: float) -> None:
    """A connection, until both of its directions have ended."""
    with near, socket.create_connection(to) as far:
        for end in (near, far):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        wires = (_Wire(near, far, delay_s), _Wire(far, near, delay_s))
        threads = [threading.Thread(target=work) for wire in wires for work in (wire.take_in, wire.hand_out)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


def _end_with_stdin() -> None:
    sys.stdin.read()
    os._exit(0)


def main(listen: str, to: str, delay_ms: str) -> None:
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    with socket.create_server(_address(listen), backlog=128) as server:
        print(server.getsockname()[1], flush=True)
        while True:
            near, _ = server.accept()
            work = (near, _address(to), float(delay_ms) / 1000)
            threading.Thread(target=_pass_on, args=work, daemon=True).start()


if __name__ == "__main__":
    main(*sys.argv[1:])
