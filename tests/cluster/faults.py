"""Faults between a client and its bucket: a proxy that spoils HTTP exchanges, and a ``Store`` that spoils calls."""

from __future__ import annotations

import http.client
import socket
import struct
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal
from urllib.parse import urlsplit

from gpuctl.cluster.bucket import Entry, Store
from gpuctl.cluster.errors import StoreUnavailable

Spoil = Literal["refuse", "reset", "hold", "land-refuse", "land-reset", "land-cut", "land-hold"]
"""What becomes of an exchange. Those with ``land`` reach the server, and then:

- ``refuse``: the answer is ``status`` and ``code`` instead.
- ``reset``: the connection is reset without an answer.
- ``cut``: the connection is reset in the middle of the answer's body.
- ``hold``: the answer waits until ``gate`` opens. Without ``land``, the request itself does, and then it goes its way.
"""


@dataclass
class Fault:
    """A plan for the next ``times`` requests of ``method`` whose path and query contain ``where``."""

    spoil: Spoil
    method: str
    where: str = ""
    times: int = 1
    status: int = 503
    code: str = "SlowDown"
    met: threading.Event = field(default_factory=threading.Event)
    """Set once a request has met this fault, and for ``land-…`` has landed."""
    gate: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)
    """Set once the last exchange that met this fault has ended, on our side."""


class Proxy:
    """Stands before an S3 server at ``upstream``. ``seen`` are the requests so far, as "METHOD path?query"."""

    def __init__(self, upstream: str, *, strip: Iterable[str] = ()) -> None:
        self.upstream = urlsplit(upstream).netloc
        self.strip = {name.lower() for name in strip}
        self.seen: list[str] = []
        self._faults: list[Fault] = []
        self._lock = threading.Lock()
        self._server = _Server(self)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def plan(self, spoil: Spoil, method: str, where: str = "", **details: Any) -> Fault:
        fault = Fault(spoil, method, where, **details)
        with self._lock:
            self._faults.append(fault)
        return fault

    def heal(self) -> None:
        """Forget every plan, and let go of what is held."""
        with self._lock:
            healed, self._faults = self._faults, []
        for fault in healed:
            fault.gate.set()

    def take(self, method: str, path: str) -> Fault | None:
        with self._lock:
            self.seen.append(f"{method} {path}")
            for fault in self._faults:
                if fault.times and fault.method == method and fault.where in path:
                    fault.times -= 1
                    return fault
        return None

    @contextmanager
    def running(self) -> Iterator[Proxy]:
        thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield self
        finally:
            self.heal()
            self._server.shutdown()
            self._server.server_close()
            thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, proxy: Proxy) -> None:
        self.proxy = proxy
        super().__init__(("127.0.0.1", 0), _Exchange)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that gave up is what these tests are about."""


class _Exchange(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def log_message(self, *_: Any) -> None: ...

    def exchange(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault = self.server.proxy.take(self.command, self.path)
        if fault is None:
            self._answer(*self._forward(body))
            return
        try:
            self._spoil(fault, body)
        finally:
            fault.over.set()

    def _spoil(self, fault: Fault, body: bytes) -> None:
        landed = self._forward(body) if fault.spoil.startswith("land-") else None
        fault.met.set()
        match fault.spoil:
            case "refuse" | "land-refuse":
                self._answer(fault.status, [], f"<Error><Code>{fault.code}</Code></Error>".encode())
            case "reset" | "land-reset":
                self._reset()
            case "land-cut":
                assert landed is not None
                self._answer(*landed, cut=True)
            case "hold" | "land-hold":
                fault.gate.wait()
                self._answer(*(landed or self._forward(body)))

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = exchange  # noqa: N815 - the library's names

    def _forward(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        headers = {k: v for k, v in self.headers.items() if k.lower() not in self.server.proxy.strip}
        connection = http.client.HTTPConnection(self.server.proxy.upstream, timeout=30)
        try:
            connection.request(self.command, self.path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            connection.close()

    def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes, *, cut: bool = False) -> None:
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if cut:
            self.wfile.write(body[: len(body) // 2])
            self._reset()
        elif self.command != "HEAD":
            self.wfile.write(body)

    def _reset(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True


Trouble = Literal["none", "lost", "unheard", "retried"]
"""``lost``: the call never reached the store. ``unheard``: it did, and the answer got lost. ``retried``: so it did, and
the client tried again: a ``create`` then finds its own object and says ``False``."""


class FaultyStore:
    """A ``Store`` before another. ``trouble`` names what happens to the next calls of a verb, in order."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.calls: list[str] = []
        self._trouble: dict[str, list[Trouble]] = {}

    def trouble(self, verb: str, *troubles: Trouble) -> None:
        self._trouble.setdefault(verb, []).extend(troubles)

    def _call(self, verb: str, *args: Any) -> Any:
        self.calls.append(verb)
        trouble = self._trouble[verb].pop(0) if self._trouble.get(verb) else None
        if trouble == "lost":
            raise StoreUnavailable(f"{verb} never arrived")
        answer = getattr(self.inner, verb)(*args)
        if trouble == "unheard":
            raise StoreUnavailable(f"the answer to {verb} got lost")
        if trouble == "retried":
            return getattr(self.inner, verb)(*args)
        return answer

    def get(self, key: str) -> bytes | None:
        answer: bytes | None = self._call("get", key)
        return answer

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        return [self.get(key) for key in keys]

    def get_range(self, key: str, start: int, end: int) -> memoryview:
        answer: memoryview = self._call("get_range", key, start, end)
        return answer

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._call("put", key, data)

    def create(self, key: str, data: bytes) -> bool:
        answer: bool = self._call("create", key, data)
        return answer

    def list(self, prefix: str, after: str | None = None) -> list[Entry]:
        answer: list[Entry] = self._call("list", prefix, after)
        return answer

    def delete(self, keys: Iterable[str]) -> None:
        self._call("delete", list(keys))
