"""Listening sockets held ready for rounds that this node will be master of.

A port is chosen by the kernel, held from before a heartbeat offers it until the workers' store takes it over, and used
once: nobody can take it in between, and a late peer of an old round cannot reach a new one.
"""

from __future__ import annotations

import contextlib
import socket
import threading

from gpuctl.cluster.network.addresses import family_of


class PortPool:
    """Free ports for rounds' rendezvous. Thread-safe."""

    def __init__(self, address: str, size: int = 3) -> None:
        self._address = address
        self._size = size
        self._lock = threading.Lock()
        self._sockets: dict[int, socket.socket] = {}
        self._fill()

    def offered(self) -> tuple[int, ...]:
        with self._lock:
            return tuple(self._sockets)

    def take(self, port: int) -> socket.socket | None:
        """The listening socket of ``port``, which is offered no more; ``None`` if it was taken before."""
        with self._lock:
            taken = self._sockets.pop(port, None)
            with contextlib.suppress(OSError):  # no file is left to be opened: fewer are offered until the next one
                self._fill()
            return taken

    def close(self) -> None:
        with self._lock:
            for listening in self._sockets.values():
                listening.close()
            self._sockets.clear()

    def _fill(self) -> None:
        while len(self._sockets) < self._size:
            listening = socket.create_server((self._address, 0), family=family_of(self._address), backlog=1024)
            self._sockets[listening.getsockname()[1]] = listening


def reserved(listening: socket.socket) -> socket.socket:
    """Trade a listening socket for one that only keeps its port: the kernel gives it to nobody, while a program that
    names it may listen there, as torch's store does. Raises ``OSError`` if it was taken in that moment."""
    address = listening.getsockname()
    listening.close()
    keeper = socket.socket(listening.family)
    keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        keeper.bind(address)
    except OSError:
        keeper.close()
        raise
    return keeper
