"""A key-value store over HTTP on rank 0, through which the processes of a round learn each other's ports.

It speaks what Horovod's rendezvous does (``horovod/runner/http/http_server.py``), which is a client of it: PUT stores,
GET answers with 404 until something is stored, DELETE forgets. Each round has its own, on a port of its own, so nothing
of an earlier round can be met there. It is needed while processes start, and lost with rank 0, which the round is too.

Also read by the interpreters of images, which have no gpuctl: the standard library only, from Python 3.8 on.
"""

from __future__ import annotations

import http.client
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_MOST_BYTES = 1 << 20
_LOOK_S = 0.05
_ASK_S = 5.0


class KeyValueStore:
    """Serves on a socket that listens, until it is closed."""

    def __init__(self, listening: socket.socket) -> None:
        self._server = _Server(listening)
        serve = self._server.serve_forever
        threading.Thread(target=serve, args=(_LOOK_S,), name="key-value-store", daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, listening: socket.socket) -> None:
        address = listening.getsockname()
        super().__init__(address[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self.server_address = address
        self.values: dict[str, bytes] = {}


class _Handler(BaseHTTPRequestHandler):
    timeout = 30
    """Seconds, for who connects and says nothing."""
    server: _Server

    def do_GET(self) -> None:
        value = self.server.values.get(self.path)
        if value is None:
            self._answer(404)
        else:
            self._answer(200, value)

    def do_PUT(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        if size > _MOST_BYTES:
            self._answer(413)
        else:
            self.server.values[self.path] = self.rfile.read(size)
            self._answer(200)

    def do_DELETE(self) -> None:
        self.server.values.pop(self.path, None)
        self._answer(200)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Nothing: it would go among what the script prints."""

    def _answer(self, code: int, value: bytes = b"") -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(value)))
        self.end_headers()
        self.wfile.write(value)


def put(host: str, port: int, key: str, value: bytes, deadline: float) -> None:
    """Store ``value`` under ``key``. Raises ``TimeoutError`` if nobody is there by ``deadline`` (monotonic clock)."""
    while _asked(host, port, "PUT", key, value) is None:
        _wait(deadline, f"nobody answers at {host} port {port}, on rank 0")


def get(host: str, port: int, key: str, deadline: float) -> bytes:
    """The value of ``key``, once it is there. Raises ``TimeoutError`` if it is not by ``deadline``."""
    while (value := _asked(host, port, "GET", key)) is None:
        _wait(deadline, f"{key} was not told to rank 0")
    return value


def _asked(host: str, port: int, method: str, key: str, value: bytes = b"") -> bytes | None:
    """The answer; ``None`` if there is none, or it was not found."""
    connection = http.client.HTTPConnection(host, port, timeout=_ASK_S)
    try:
        connection.request(method, f"/{key}", body=value or None)
        answer = connection.getresponse()
        body = answer.read()
    except (OSError, http.client.HTTPException):
        return None
    else:
        return body if answer.status == 200 else None
    finally:
        connection.close()


def _wait(deadline: float, why: str) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError(why)
    time.sleep(_LOOK_S)
