"""Reads what a rank needs of a checkpoint: only those blocks, in parallel, each verified, straight to where it belongs.

What torch plans to load is a list of boxes of stored chunks. A box is cut into *slabs* of consecutive bytes; the slabs
of one part are read together, so that many small tensors cost one request. At any time ``threads`` reads of at most one
part each are in memory, and besides only slabs that lie across two pieces of what is read.
"""

from __future__ import annotations

import threading
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from typing import Protocol

import torch
from torch.distributed.checkpoint.planner import ReadItem

from gpuctl.cluster.bucket import PartStore
from gpuctl.cluster.errors import Damaged, StoreError
from gpuctl.cluster.manifest import BLOCK_BYTES, Chunk, Manifest, Part, Piece, digest
from gpuctl.trainers.raw import copy_flat, flat_bytes, is_plain
from gpuctl.trainers.state import dtype_of
from gpuctl.trainers.threads import in_threads

# Nobody writes to what was read; torch says so once for each process.
warnings.filterwarnings("ignore", message="The given buffer is not writable")


class Source(Protocol):
    """A place that may have parts: the bucket, this node's disk, a neighbour."""

    @property
    def name(self) -> str: ...

    def read(self, part: Part, low: int, high: int) -> Iterator[memoryview]:
        """Bytes ``[low, high)`` of ``part`` in pieces that end with a block, or fewer if there are no more. Each piece
        is good until the next one is asked for."""
        ...


class BucketSource:
    """The bucket. ``store`` shows the job's checkpoint folder."""

    name = "the bucket"

    def __init__(self, store: PartStore) -> None:
        self._store = store

    def read(self, part: Part, low: int, high: int) -> Iterator[memoryview]:
        """In one piece: each request has its price."""
        try:
            yield self._store.get_range(part.key, low, high)
        except FileNotFoundError:
            return
        except StoreError:
            # Stores differ in how they refuse a range past the end.
            whole = self._store.get(part.key)
            if whole is not None:
                if len(whole) >= high:
                    raise
                yield memoryview(whole)[low:]


class Parts:
    """Verified reads of parts, from the first of ``sources`` that has what was written. Thread-safe."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources
        self._lock = threading.Lock()
        self.served: dict[str, int] = {}
        """How many bytes came from which source."""

    def told(self) -> str:
        """For people: which tier served how much."""
        told = [f"{size / 1e6:.1f} MB from {name}" for name, size in self.served.items() if size]
        return ", ".join(told) or "nothing to read"

    def read(self, part: Part, low: int, high: int) -> Iterator[tuple[int, memoryview]]:
        """Bytes ``[low, high)``, which begin and end with a block or the part, block by block, each with where it
        begins: what was just verified is still in the processor's cache. A block is good until the next is asked for.

        Raises ``Damaged`` if no source has them as they were written, ``StoreUnavailable`` if the bucket is away.
        """
        at, fault = low, ""
        for source in self._sources:
            begun, fault = at, "is missing"
            for block in _blocks_of(source.read(part, at, high)):
                if fault := _fault(part, at, block):
                    break
                yield at, block
                at += len(block)
            with self._lock:
                self.served[source.name] = self.served.get(source.name, 0) + at - begun
            if at >= high:
                return
        raise Damaged(f"{part.key} {fault or 'is cut short'}")


def _blocks_of(pieces: Iterable[memoryview]) -> Iterator[memoryview]:
    for piece in pieces:
        for low in range(0, len(piece), BLOCK_BYTES):
            yield piece[low : low + BLOCK_BYTES]


def _fault(part: Part, at: int, block: memoryview) -> str:
    """What is wrong with the block that begins at byte ``at``; empty if nothing is."""
    if at < part.size and digest(block) == part.blocks[at // BLOCK_BYTES]:
        return ""
    return "is cut short" if len(block) < min(BLOCK_BYTES, part.size - at) else "is not what was written"


def read_value(manifest: Manifest, name: str, parts: Parts) -> bytes | None:
    """A value that is no tensor, as JSON; ``None`` if the checkpoint has none of that name."""
    pieces = manifest.values.get(name)
    if pieces is None:
        return None
    data = bytearray()
    for piece in pieces:
        part = manifest.parts[piece.part]
        for at, read in parts.read(part, *_blocks(part, piece.at, piece.at + piece.size)):
            data += read[max(0, piece.at - at) : max(0, piece.at + piece.size - at)]
    return bytes(data)


def load(
    manifest: Manifest,
    items: Iterable[ReadItem],
    target_of: Callable[[ReadItem], torch.Tensor],
    parts: Parts,
    threads: int,
) -> None:
    """Fill the box ``target_of(item)`` of each item with what is stored. Raises what the first read that fails raises,
    once those beside it have ended, and begins no other; the targets are then partly filled."""
    wanted: dict[int, list[_Want]] = {}
    for item in items:
        tensor = manifest.tensors[item.storage_index.fqn]
        chunk, dtype = _chunk(tensor.chunks, item), dtype_of(tensor)
        if sum(piece.size for piece in chunk.pieces) != prod(chunk.sizes) * dtype.itemsize:
            raise Damaged(f"the manifest has not all bytes of {item.storage_index.fqn!r}")
        box = _Box(chunk.sizes, tuple(item.storage_offsets), tuple(item.lengths))
        ends = list(accumulate(piece.size for piece in chunk.pieces))
        for slab in _slabs(0, box, target_of(item).detach(), dtype):
            for want in _wants(slab, chunk.pieces, ends):
                wanted.setdefault(want.piece.part, []).append(want)
    reads = [(manifest.parts[number], run) for number in sorted(wanted) for run in _runs(wanted[number])]
    in_threads(lambda read: _read(*read, parts), reads, min(threads, len(reads)))


@dataclass(frozen=True, slots=True)
class _Box:
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    def rows(self, first: int, count: int) -> _Box:
        return _Box(self.sizes, (self.offsets[0] + first, *self.offsets[1:]), (count, *self.lengths[1:]))

    def inner(self) -> _Box:
        return _Box(self.sizes[1:], self.offsets[1:], self.lengths[1:])


@dataclass(slots=True)
class _Slab:
    """Consecutive bytes ``[low, high)`` of a chunk, and what to do with them: they go to ``flat`` as they are, or to
    ``apply`` once they are all there."""

    low: int
    high: int
    apply: Callable[[torch.Tensor], None] | None = None
    flat: torch.Tensor | None = None
    missing: int = 0
    buffer: torch.Tensor | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def deliver(self, at: int, data: torch.Tensor) -> None:
        """Bytes of the slab from its byte ``at`` on."""
        if self.flat is not None:
            copy_flat(self.flat[at : at + data.numel()], data)
            return
        assert self.apply is not None
        if data.numel() == self.high - self.low:
            self.apply(data)
            return
        with self.lock:
            if self.buffer is None:
                self.buffer, self.missing = torch.empty(self.high - self.low, dtype=torch.uint8), self.high - self.low
            self.buffer[at : at + data.numel()] = data
            self.missing -= data.numel()
            if self.missing == 0:
                self.apply(self.buffer)
                self.buffer = None


@dataclass(frozen=True, slots=True)
class _Want:
    """The bytes of a slab, from its byte ``at`` on, that ``piece`` names."""

    piece: Piece
    slab: _Slab
    at: int


def _slabs(base: int, box: _Box, target: torch.Tensor, dtype: torch.dtype) -> Iterator[_Slab]:
    """The bytes of ``box``, in the chunk whose byte ``base`` it begins at, and where in ``target`` they go."""
    if 0 in box.lengths:
        return
    if not box.sizes:
        yield _Slab(base, base + dtype.itemsize, lambda raw: _fill(target, raw.view(dtype).reshape(())))
        return
    row = prod(box.sizes[1:]) * dtype.itemsize
    low, count = base + box.offsets[0] * row, box.lengths[0]
    whole_rows = box.sizes[1:] == box.lengths[1:]
    if whole_rows and is_plain(target) and target.device.type == "cpu":
        yield from _cut(low, flat_bytes(target))
    elif row > BLOCK_BYTES and len(box.sizes) > 1:
        for i in range(count):
            yield from _slabs(low + i * row, box.inner(), target[i], dtype)
    else:
        step = max(1, BLOCK_BYTES // row)
        for first in range(0, count, step):
            rows = box.rows(first, min(step, count - first))
            begin = low + first * row
            yield _Slab(begin, begin + rows.lengths[0] * row, _narrowed(rows, target[first : first + step], dtype))


def _cut(low: int, flat: torch.Tensor) -> Iterator[_Slab]:
    """Bytes that go where they go as they are: in any pieces."""
    for first in range(0, flat.numel(), BLOCK_BYTES):
        part = flat[first : first + BLOCK_BYTES]
        yield _Slab(low + first, low + first + part.numel(), flat=part)


def _narrowed(rows: _Box, target: torch.Tensor, dtype: torch.dtype) -> Callable[[torch.Tensor], None]:
    def apply(raw: torch.Tensor) -> None:
        source = raw.view(dtype).reshape(rows.lengths[0], *rows.sizes[1:])
        for dim in range(1, len(rows.sizes)):
            source = source.narrow(dim, rows.offsets[dim], rows.lengths[dim])
        _fill(target, source)

    return apply


def _fill(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)


def _wants(slab: _Slab, pieces: Sequence[Piece], ends: Sequence[int]) -> Iterator[_Want]:
    """Which bytes of which parts make up ``slab``."""
    number, low = bisect_right(ends, slab.low), slab.low
    while low < slab.high:
        piece = pieces[number]
        skipped = low - (ends[number] - piece.size)
        size = min(slab.high - low, piece.size - skipped)
        yield _Want(Piece(piece.part, piece.at + skipped, size), slab, low - slab.low)
        low, number = low + size, number + 1


def _runs(wants: list[_Want]) -> Iterator[list[_Want]]:
    """Those that share blocks or whose blocks lie side by side: one read each."""
    run: list[_Want] = []
    end = 0
    for want in sorted(wants, key=lambda want: want.piece.at):
        if run and want.piece.at // BLOCK_BYTES > end:
            yield run
            run = []
        run.append(want)
        end = max(end, -(-(want.piece.at + want.piece.size) // BLOCK_BYTES))
    yield run


def _read(part: Part, run: list[_Want], parts: Parts) -> None:
    low, high = _blocks(part, run[0].piece.at, max(want.piece.at + want.piece.size for want in run))
    done = 0
    for at, piece in parts.read(part, low, high):
        data, end = torch.frombuffer(piece, dtype=torch.uint8), at + len(piece)
        for want in run[done:]:
            begin = max(at, want.piece.at)
            if begin >= end:
                break
            if (size := min(end, want.piece.at + want.piece.size) - begin) > 0:
                want.slab.deliver(want.at + begin - want.piece.at, data[begin - at : begin - at + size])
        while done < len(run) and run[done].piece.at + run[done].piece.size <= end:
            done += 1


def _blocks(part: Part, low: int, high: int) -> tuple[int, int]:
    """The blocks that cover ``[low, high)``."""
    return low // BLOCK_BYTES * BLOCK_BYTES, min(part.size, -(-high // BLOCK_BYTES) * BLOCK_BYTES)


def _chunk(chunks: Sequence[Chunk], item: ReadItem) -> Chunk:
    offset = item.storage_index.offset
    for chunk in chunks:
        if offset is None or tuple(offset) == chunk.offsets:
            return chunk
    raise Damaged(f"the manifest has no part of {item.storage_index.fqn!r} at {offset}")
