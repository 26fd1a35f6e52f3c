"""A file on its way to the bucket, in parts: a slow line then needs no single long request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from gpuctl.cluster.errors import StoreUnavailable
from gpuctl.cluster.storage.bucket import Bucket
from gpuctl.cluster.storage.error_mapping import shown

_CHUNK_BYTES = 8 * 1024 * 1024
_ONE_PUT_BYTES = 32 * 1024 * 1024


def upload_file(bucket: Bucket, key: str, path: Path, on_bytes: Callable[[int], None] = lambda _: None) -> None:
    """Upload what lies at ``path``; no harm is done if the bucket has it.

    Args:
        bucket: where to.
        key: a name that stands for the content: it is not create-only.
        path: the file.
        on_bytes: takes how many more bytes were sent.

    Raises ``StoreUnavailable``, ``StoreError`` as the bucket does, and ``OSError`` for the file.
    """
    size = path.stat().st_size
    if size > _ONE_PUT_BYTES:
        with path.open("rb") as file:
            upload_chunks(bucket, key, _chunks(file, on_bytes))
        return
    bucket.create(key, path.read_bytes())
    on_bytes(size)


def upload_chunks(bucket: Bucket, key: str, chunks: Iterator[bytes]) -> None:
    """Upload what ``chunks`` are, one after the other, as one object, which is there once all of it has come.

    Raises ``StoreUnavailable``.
    """
    import obstore
    from obstore.exceptions import BaseError

    try:
        obstore.put(bucket.raw, key, chunks, chunk_size=_CHUNK_BYTES)
    except (BaseError, OSError) as error:
        reason = str(error).split("\n", 1)[0]
        raise StoreUnavailable(f"the upload to {shown(bucket.url)} failed: {reason}", "try again") from error


def _chunks(file: IO[bytes], on_bytes: Callable[[int], None]) -> Iterator[bytes]:
    while chunk := file.read(_CHUNK_BYTES):
        yield chunk
        on_bytes(len(chunk))
