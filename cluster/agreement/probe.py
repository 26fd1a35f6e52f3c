"""Whether a store can decide between two writers."""

from __future__ import annotations

import contextlib
import uuid

from gpuctl.cluster.errors import StoreError, StoreUnavailable
from gpuctl.cluster.storage.interface import Store


def probe(store: Store) -> None:
    """Refuse a store whose create-only put lets a second writer win: every agreement here rests on it.

    AWS S3, GCS, Azure Blob Storage and MinIO document that they honour it. Measured: Azurite does, ``rclone serve s3``
    lets all writers win, and moto sometimes two (the tests fix that).

    Raises ``StoreError``.
    """
    key = f"probe/{uuid.uuid4().hex}"
    try:
        store.create(key, b"first")  # it may say False of a put that landed; the key is nobody else's
        if store.create(key, b"second") or store.get(key) != b"first":
            raise StoreError(
                "this bucket ignores create-only puts (If-None-Match: *), so two nodes could both win an election",
                "use a store that honours them: S3, GCS, Azure Blob, MinIO, or a local folder",
            )
    finally:
        with contextlib.suppress(StoreError, StoreUnavailable):
            store.delete([key])
