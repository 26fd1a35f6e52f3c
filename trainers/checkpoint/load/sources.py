"""Where the blocks of a part are read from, the nearest place first."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import xxhash

from gpuctl.cluster.checkpoints.manifest import BLOCK_BYTES, Part
from gpuctl.cluster.errors import Damaged, StoreError
from gpuctl.cluster.storage.interface import PartStore


class Source(Protocol):
    """A source of parts: the bucket, this node's disk, a peer."""

    @property
    def name(self) -> str: ...

    def read(self, part: Part, low: int, high: int) -> Iterator[memoryview]:
        """Bytes ``[low, high)`` of ``part`` in pieces of any size, or fewer if there are no more. Each piece is good
        until the next one is asked for."""
        ...


class BucketSource:
    """Reads parts from the bucket. ``store`` shows the job's checkpoint folder."""

    name = "the bucket"

    def __init__(self, store: PartStore) -> None:
        self._store = store

    def read(self, part: Part, low: int, high: int) -> Iterator[memoryview]:
        """Read by one request: each has its price."""
        at = low
        try:
            for piece in self._store.stream(part.key, low, high):
                yield piece
                at += len(piece)
        except FileNotFoundError:
            return
        except StoreError:
            # Stores differ in how they refuse a range past the end.
            whole = self._store.get(part.key)
            if whole is not None:
                if len(whole) >= high:
                    raise
                yield memoryview(whole)[at:]


class Parts:
    """Verified reads of parts, from the first of ``sources`` that has what was written. Thread-safe."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources
        self._lock = threading.Lock()
        self.served: dict[str, int] = {}
        """How many bytes came from which source."""

    def describe(self) -> str:
        """Describe which source served how much."""
        told = [f"{size / 1e6:.1f} MB from {name}" for name, size in self.served.items() if size]
        return ", ".join(told) or "nothing to read"

    def read(self, part: Part, low: int, high: int) -> Iterator[tuple[int, memoryview, bool]]:
        """Bytes ``[low, high)``, which begin and end with a block or the part, as they come: where each piece begins,
        its bytes, and whether the block that it lies in ends with it and is what was written. Until it does, its bytes
        are not to be trusted, and those of the block may come once more from another source, from its first one on.
        No piece lies in two blocks. Each is good until the next one is asked for.

        Raises ``Damaged`` if no source has them as they were written, ``StoreUnavailable`` if the bucket is away.
        """
        at, fault = low, ""
        for source in self._sources:
            begun, fault = at, "is missing"
            came, hashed = 0, xxhash.xxh3_128()
            for piece in _within_blocks(source.read(part, at, high)):
                hashed.update(piece)
                came += len(piece)
                whole = came >= min(BLOCK_BYTES, part.size - at)
                if whole and hashed.hexdigest() != part.blocks[at // BLOCK_BYTES]:
                    fault = "is not what was written"
                    break
                fault = "" if whole else "is cut short"
                yield at + came - len(piece), piece, whole
                if whole:
                    at, came = at + came, 0
                    hashed.reset()
                if at >= high:
                    break
            with self._lock:
                self.served[source.name] = self.served.get(source.name, 0) + at - begun
            if at >= high:
                return
        raise Damaged(f"{part.key} {fault or 'is cut short'}")


def _within_blocks(pieces: Iterable[memoryview]) -> Iterator[memoryview]:
    """The same bytes, which begin with a block, cut where a block ends."""
    left = BLOCK_BYTES
    for piece in pieces:
        rest = piece
        while len(rest) > 0:
            yield rest[:left]
            rest, left = rest[left:], left - min(left, len(rest))
            left = left or BLOCK_BYTES


def blocks_around(part: Part, low: int, high: int) -> tuple[int, int]:
    """The blocks that cover ``[low, high)``."""
    return low // BLOCK_BYTES * BLOCK_BYTES, min(part.size, -(-high // BLOCK_BYTES) * BLOCK_BYTES)
