"""Several records at once. What another version of gpuctl wrote is passed over: it says nothing to this one."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TypeVar

from gpuctl.cluster.errors import CorruptRecord
from gpuctl.cluster.records.codec import decode
from gpuctl.cluster.storage.interface import Entry, Store

T = TypeVar("T")


def read_each(store: Store, keys: Sequence[str], kind: type[T]) -> dict[str, T]:
    """Read records by key, in the order of ``keys``: those that exist."""
    found = {}
    for key, data in zip(keys, store.get_many(keys) if keys else [], strict=True):
        with contextlib.suppress(CorruptRecord):
            if data is not None:
                found[key] = decode(data, kind, key)
    return found


def read_folder(store: Store, folder: str, kind: type[T]) -> list[tuple[Entry, T]]:
    """All that lie right in ``folder``, in key order."""
    entries = {e.key: e for e in store.list(folder) if e.key.endswith(".json") and e.key.count("/") == 1}
    return [(entries[key], record) for key, record in read_each(store, list(entries), kind).items()]
