"""A server that gives the answers it is told to, whatever it is asked."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@contextmanager
def answering(*codes: int) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """A server that gives these answers, one after the other, and what it was asked."""
    seen: list[dict[str, str]] = []
    left = list(codes)

    class Exchange(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None: ...

        def do_PUT(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
            seen.append(
                {"path": self.path, "body": body, **{name.lower(): value for name, value in self.headers.items()}}
            )
            said = b"said the server"
            self.send_response(left.pop(0))
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        do_POST = do_PUT  # noqa: N815 - the library's names

    with ThreadingHTTPServer(("127.0.0.1", 0), Exchange) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", seen
        finally:
            server.shutdown()
            thread.join()
