"""Amazon S3 as moto speaks it, one request after the other.

By itself moto looks whether an object is there and writes it in two steps, so that under load two writers of a
create-only put win, and a read of what is just written over ends with a 500.
"""

from __future__ import annotations

import io
import logging
import sys
import threading
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import quote

from tests.fakes.stores.serving import started

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment


@contextmanager
def serving() -> Iterator[str]:
    """Yields the server's URL."""
    with started([sys.executable, "-m", "tests.fakes.stores.s3"], r"^(\d+)$") as port:
        yield f"http://127.0.0.1:{port}"


def create(endpoint: str, bucket: str) -> None:
    with urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{bucket}", method="PUT"), timeout=30):
        pass


def url(endpoint: str, bucket: str, secret: str = "test") -> str:
    """What ``open_bucket`` takes for a prefix in ``bucket``. The server believes any ``secret``."""
    options = f"endpoint={endpoint}&region=us-east-1&access_key_id=test&secret_access_key={quote(secret, safe='')}"
    return f"s3://{bucket}/prefix?{options}"


def in_turn(application: WSGIApplication) -> WSGIApplication:
    """``application``, which then meets one request at a time, and none that is still on its way."""
    turn = threading.Lock()

    def serve(request: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        body = request["wsgi.input"].read(int(request.get("CONTENT_LENGTH") or 0))
        with turn:
            return application({**request, "wsgi.input": io.BytesIO(body)}, start)

    return serve


def _serve() -> None:
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
    from werkzeug.serving import make_server

    # What moto lacks is answered with a 500, and not with a page of traceback besides.
    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    application = in_turn(DomainDispatcherApplication(create_backend_app))
    address = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1"
    server = make_server(address, 0, application, threaded=True, request_handler=MotoRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_port, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    _serve()
