"""Append-only streams (logs, metrics) on object storage, which cannot append.

A stream of one node in one round is a folder of chunks, ``00000001.jsonl`` and on. The last chunk is written anew as it
grows, and a new one begins at ``chunk_bytes``: so the number of objects follows the bytes, not the time, and a reader
needs only what is past its position. Lines are whole JSON objects; a chunk never ends inside one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from gpuctl.cluster.storage.interface import Store

_CHUNK_BYTES = 256 * 1024


class ChunkWriter:
    """Appends lines to one node's stream. Not thread-safe."""

    def __init__(self, store: Store, folder: str, *, chunk_bytes: int = _CHUNK_BYTES) -> None:
        self._store = store
        self._folder = folder
        self._chunk_bytes = chunk_bytes
        self._number = 1
        self._current = bytearray()

    def append(self, lines: bytes) -> None:
        """``lines`` ends in a newline. Raises as ``Store.put`` does; they are then sent with the next call."""
        self._current += lines
        self._store.put(f"{self._folder}/{self._number:08d}.jsonl", bytes(self._current))
        if len(self._current) >= self._chunk_bytes:
            self._number += 1
            self._current.clear()


@dataclass(slots=True)
class StreamReader:
    """Reads all streams below ``prefix`` (``<round>/<node>/<chunk>``), from where the last ``read`` ended."""

    store: Store
    prefix: str
    _positions: dict[str, int] = field(default_factory=dict)

    def read(self, *, number: int | None = None, node: str | None = None) -> Iterator[tuple[int, str, dict[str, Any]]]:
        """(round, node, line) of what is new, in order within a node; limited to a round or a node if given."""
        for entry in self.store.list(self.prefix if number is None else f"{self.prefix}/{number:06d}"):
            round_name, node_name, _ = entry.key.removeprefix(f"{self.prefix}/").split("/")
            start = self._positions.get(entry.key, 0)
            if entry.size <= start or (node is not None and node_name != node):
                continue
            data = self.store.get(entry.key)
            if data is None:
                continue
            self._positions[entry.key] = len(data)
            for line in data[start:].splitlines():
                yield int(round_name), node_name, msgspec.json.decode(line)
