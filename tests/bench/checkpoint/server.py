"""moto's S3 server, relieved of what no real store does: it copies an object several times to put it together from its
parts, and again for each range that is read. Without that it would be the large objects' multipart references that are
measured, and moto's copies in them.

python tests/bench/checkpoint/server.py ADDRESS

Prints its pid and its port. Ends with its parent, whose end closes its standard input.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[3])

import xxhash
from moto.s3 import models
from moto.server import ThreadedMotoServer

from tests.bench.checkpoint import memory_guard

_MOST_BYTES = 12 << 30


def main(address: str) -> None:
    memory_guard.go_first()
    memory_guard.limit(_MOST_BYTES)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    key: Any = models.FakeKey
    key.value = property(_value, _set_value)
    key.dispose = _dispose
    upload: Any = models.FakeMultipart
    upload.complete = _complete
    server = ThreadedMotoServer(ip_address=address, port=0, verbose=False)
    server.start()
    print(os.getpid(), server.get_host_and_port()[1], flush=True)
    sys.stdin.read()


def _value(key: Any) -> bytes:
    held: bytes = key.held
    return held


def _set_value(key: Any, value: bytes) -> None:
    key.held = value
    key.contentsize = len(value)
    if key._etag is None:
        key._etag = xxhash.xxh3_128_hexdigest(value)


def _dispose(key: Any, garbage: bool = False) -> None:
    """moto remembers every key that there ever was."""
    del garbage
    key.held = b""
    if key.multipart is not None:
        key.multipart.dispose()
        key.multipart = None


def _complete(upload: Any, body: Iterator[tuple[int, str]]) -> tuple[bytes, str, None]:
    parts = [upload.parts[number] for number, _ in body]
    digest = xxhash.xxh3_128_hexdigest("".join(part._etag for part in parts).encode())
    return b"".join(part.held for part in parts), f"{digest}-{len(parts)}", None


if __name__ == "__main__":
    main(*sys.argv[1:])
