"""Faults between a client and its bucket: a proxy that spoils HTTP exchanges, and a ``Store`` that spoils calls."""

from __future__ import annotations

import http.client
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal
from urllib.parse import urlsplit

from gpuctl.cluster.errors import StoreUnavailable
from gpuctl.cluster.storage.interface import Entry, Store

Spoil = Literal["refuse", "reset", "break", "hold", "land-refuse", "land-reset", "land-cut", "land-hold"]
"""What becomes of an exchange. Those with ``land`` reach the server, and then:

- ``refuse``: the answer is ``status`` and ``code`` instead.
- ``reset``: the connection is reset without an answer.
- ``break``: it is reset in the middle of the request's body.
- ``cut``: the connection is reset in the middle of the answer's body.
- ``hold``: the answer waits until ``gate`` opens. Without ``land``, the request itself does, and then it goes its way.
"""


@dataclass
class Fault:
    """A plan for the next ``times`` requests of ``method`` in whose path and query ``where``, a regular expression, is
    found."""

    spoil: Spoil
    method: str
    where: str = ""
    times: int = 1
    status: int = 503
    code: str = "SlowDown"
    message: str = ""
    strike: Callable[[], object] = lambda: None
    """Done before the spoiled answer; for ``land-…``, once the request has landed."""
    met: threading.Event = field(default_factory=threading.Event)
    """Set once a request has met this fault, and for ``land-…`` has landed."""
    gate: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)
    """Set once the last exchange that met this fault has ended, on our side."""


class Proxy:
    """Stands before the server at ``upstream``. ``seen`` are the requests so far, as "METHOD path?query".

    ``admits`` judges each request by its ``Authorization``, as S3 does; ``in_turn`` lets one exchange end before the
    next begins.
    """

    def __init__(
        self,
        upstream: str,
        *,
        strip: Iterable[str] = (),
        admits: Callable[[str], bool] = lambda _: True,
        in_turn: bool = False,
    ) -> None:
        self.upstream = urlsplit(upstream).netloc
        self.strip = {name.lower() for name in strip}
        self.admits = admits
        self.turn: AbstractContextManager[object] = threading.Lock() if in_turn else nullcontext()
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
                if fault.times and fault.method == method and re.search(fault.where, path):
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
        with self.server.proxy.turn:
            fault = self.server.proxy.take(self.command, self.path)
            if fault is None:
                self._answer(*self._forward(self._body()))
                return
            try:
                self._spoil(fault)
            finally:
                fault.over.set()

    def _spoil(self, fault: Fault) -> None:
        body = self._body(half=fault.spoil == "break")
        landed = self._forward(body) if fault.spoil.startswith("land-") else None
        fault.strike()
        fault.met.set()
        match fault.spoil:
            case "refuse" | "land-refuse":
                self._answer(*_refusal(fault.status, fault.code, fault.message))
            case "reset" | "break" | "land-reset":
                self._reset()
            case "land-cut":
                assert landed is not None
                self._answer(*landed, cut=True)
            case "hold" | "land-hold":
                fault.gate.wait()
                self._answer(*(landed or self._forward(body)))

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = exchange  # noqa: N815 - the library's names

    def _body(self, *, half: bool = False) -> bytes:
        size = int(self.headers.get("Content-Length", 0))
        return self.rfile.read(size // 2 if half else size)

    def _forward(self, body: bytes) -> _Answer:
        if not self.server.proxy.admits(self.headers.get("Authorization", "")):
            return _refusal(400, "ExpiredToken", "The provided token has expired.")
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


_Answer = tuple[int, list[tuple[str, str]], bytes]
"""Status, headers, body."""


def _refusal(status: int, code: str, message: str) -> _Answer:
    return status, [], f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()


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

    def stream(self, key: str, start: int, end: int) -> Iterator[memoryview]:
        yield from self._call("stream", key, start, end)

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
