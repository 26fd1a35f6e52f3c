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
            listening = _listening(self._address)
            self._sockets[listening.getsockname()[1]] = listening


def _listening(address: str) -> socket.socket:
    """At a port that nobody has at another address of this machine, for programs that listen at all of them: torch's
    store, JAX's coordinator."""
    with _everywhere() as chosen:
        server = address, chosen.getsockname()[1]
        return socket.create_server(server, family=family_of(address), backlog=1024)


def _everywhere() -> socket.socket:
    """Bound to a free port at all addresses; who names it may listen there."""
    dual = socket.has_dualstack_ipv6()
    bound = socket.socket(socket.AF_INET6 if dual else socket.AF_INET)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if dual:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        bound.bind(("", 0))
    except BaseException:
        bound.close()
        raise
    return bound


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
