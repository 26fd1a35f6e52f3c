"""Amazon S3 as moto's server speaks it."""

from __future__ import annotations

import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import quote

from tests.stores.serving import started

_SERVER = """
import logging, sys
from moto.server import ThreadedMotoServer
logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


@contextmanager
def serving() -> Iterator[str]:
    """Yields the server's URL."""
    with started([sys.executable, "-c", _SERVER], r"^(\d+)$") as port:
        yield f"http://127.0.0.1:{port}"


def create(endpoint: str, bucket: str) -> None:
    with urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{bucket}", method="PUT"), timeout=30):
        pass


def url(endpoint: str, bucket: str, secret: str = "test") -> str:
    """What ``open_bucket`` takes for a prefix in ``bucket``. The server believes any ``secret``."""
    options = f"endpoint={endpoint}&region=us-east-1&access_key_id=test&secret_access_key={quote(secret, safe='')}"
    return f"s3://{bucket}/prefix?{options}"
