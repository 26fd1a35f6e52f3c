"""Reads what a rank needs of a checkpoint: only those blocks, in parallel, each verified, straight to where it belongs.

What torch plans to load is a list of boxes of stored chunks. A box is cut into *slabs* of consecutive bytes; the slabs
of one part are read together, so that many small tensors cost one request. Bytes that lie in host memory as they are
stored go there piece by piece as they arrive, and are verified on the way: a block that turns out to be damaged is read
again from the next place that has it, and if none is left, the load fails. So what was loaded into is good only once
the load has returned. All other bytes wait until their block is verified: of those, each of ``threads`` reads has one
block in memory, and besides there are only slabs that lie across two blocks.
"""

from __future__ import annotations

import threading
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, takewhile
from math import prod

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.planner import ReadItem

from gpuctl.cluster.checkpoints.manifest import BLOCK_BYTES, Chunk, Manifest, Part, Piece
from gpuctl.cluster.concurrency import for_each
from gpuctl.cluster.errors import Damaged
from gpuctl.trainers.checkpoint.load.sources import Parts, blocks_around
from gpuctl.trainers.checkpoint.tensor_bytes import dtype_of, flat_bytes, is_plain

# Nobody writes to what was read; torch says so once for each process.
warnings.filterwarnings("ignore", message="The given buffer is not writable")


def read_values(manifest: Manifest, names: Iterable[str], parts: Parts) -> dict[str, bytes]:
    """Those of ``names`` that the checkpoint has, which are no tensors but JSON. What lies together is one request."""
    found: dict[str, npt.NDArray[np.uint8]] = {}
    wants: list[_Segment] = []
    for name in names:
        if (pieces := manifest.values.get(name)) is not None:
            ends = _ends(pieces)
            found[name] = np.empty(ends[-1] if ends else 0, dtype=np.uint8)
            wants += _wants(_ReadRange(0, found[name].size, flat=found[name]), pieces, ends)
    _read_all(manifest, wants, parts, 1)
    return {name: flat.tobytes() for name, flat in found.items()}


def load(
    manifest: Manifest,
    items: Iterable[ReadItem],
    target_of: Callable[[ReadItem], torch.Tensor],
    parts: Parts,
    threads: int,
) -> None:
    """Fill the box ``target_of(item)`` of each item with what is stored. Raises what the first read that fails raises,
    once those beside it have ended, and begins no other; the targets are then partly filled, and not all of that is
    verified."""
    wants: list[_Segment] = []
    for item in items:
        tensor = manifest.tensors[item.storage_index.fqn]
        chunk, dtype = _chunk(tensor.chunks, item), dtype_of(tensor)
        if sum(piece.size for piece in chunk.pieces) != prod(chunk.sizes) * dtype.itemsize:
            raise Damaged(f"the manifest does not have all bytes of {item.storage_index.fqn!r}")
        box = _Box(chunk.sizes, tuple(item.storage_offsets), tuple(item.lengths))
        ends = _ends(chunk.pieces)
        for read_range in _read_ranges(0, box, target_of(item).detach(), dtype):
            wants += _wants(read_range, chunk.pieces, ends)
    _read_all(manifest, wants, parts, threads)


def _read_all(manifest: Manifest, wants: Iterable[_Segment], parts: Parts, threads: int) -> None:
    wanted: dict[int, list[_Segment]] = {}
    for want in wants:
        wanted.setdefault(want.piece.part, []).append(want)
    reads = [(manifest.parts[number], run) for number in sorted(wanted) for run in _runs(wanted[number])]
    for_each(lambda read: _read(*read, parts), reads, min(threads, len(reads)))


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
class _ReadRange:
    """Consecutive bytes ``[low, high)`` of a chunk, and their destination: they go to ``flat`` as they are, or to
    ``apply`` once they are all there."""

    low: int
    high: int
    apply: Callable[[torch.Tensor], None] | None = None
    flat: npt.NDArray[np.uint8] | None = None
    """Host memory. NumPy copies to it without the interpreter's lock, as torch does, and is called in a tenth of the
    time."""
    missing: int = 0
    buffer: torch.Tensor | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def deliver(self, at: int, data: torch.Tensor) -> None:
        """Bytes of the slab from its byte ``at`` on. Each may come once only."""
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
class _Segment:
    """The bytes of a read range, from its byte ``at`` on, that ``piece`` names."""

    piece: Piece
    read_range: _ReadRange
    at: int


def _read_ranges(base: int, box: _Box, target: torch.Tensor, dtype: torch.dtype) -> Iterator[_ReadRange]:
    """The bytes of ``box``, in the chunk whose byte ``base`` it begins at, and where in ``target`` they go."""
    if 0 in box.lengths:
        return
    if target.device.type == "cpu" and is_plain(target) and box.sizes[1:] == box.lengths[1:]:
        flat, first = flat_bytes(target), box.offsets[0] * prod(box.sizes[1:]) if box.sizes else 0
        low = base + first * dtype.itemsize
        yield _ReadRange(low, low + flat.numel(), flat=flat.numpy())
        return
    if not box.sizes:
        yield _ReadRange(base, base + dtype.itemsize, lambda raw: _fill(target, raw.view(dtype).reshape(())))
        return
    row = prod(box.sizes[1:]) * dtype.itemsize
    low, count = base + box.offsets[0] * row, box.lengths[0]
    if row > BLOCK_BYTES and len(box.sizes) > 1:
        for i in range(count):
            yield from _read_ranges(low + i * row, box.inner(), target[i], dtype)
    else:
        step = max(1, BLOCK_BYTES // row)
        for first in range(0, count, step):
            rows = box.rows(first, min(step, count - first))
            begin = low + first * row
            yield _ReadRange(begin, begin + rows.lengths[0] * row, _narrowed(rows, target[first : first + step], dtype))


def _narrowed(rows: _Box, target: torch.Tensor, dtype: torch.dtype) -> Callable[[torch.Tensor], None]:
    def apply(raw: torch.Tensor) -> None:
        source = raw.view(dtype).reshape(rows.lengths[0], *rows.sizes[1:])
        for dim in range(1, len(rows.sizes)):
            source = source.narrow(dim, rows.offsets[dim], rows.lengths[dim])
        _fill(target, source)

    return apply


def _fill(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)


def _ends(pieces: Sequence[Piece]) -> list[int]:
    return list(accumulate(piece.size for piece in pieces))


def _wants(read_range: _ReadRange, pieces: Sequence[Piece], ends: Sequence[int]) -> Iterator[_Segment]:
    """Which bytes of which parts make up ``slab``."""
    number, low = bisect_right(ends, read_range.low), read_range.low
    while low < read_range.high:
        piece = pieces[number]
        skipped = low - (ends[number] - piece.size)
        size = min(read_range.high - low, piece.size - skipped)
        yield _Segment(Piece(piece.part, piece.at + skipped, size), read_range, low - read_range.low)
        low, number = low + size, number + 1


def _runs(wants: list[_Segment]) -> Iterator[list[_Segment]]:
    """Those that share blocks or whose blocks lie side by side: one read each."""
    run: list[_Segment] = []
    end = 0
    for want in sorted(wants, key=lambda want: want.piece.at):
        if run and want.piece.at // BLOCK_BYTES > end:
            yield run
            run = []
        run.append(want)
        end = max(end, -(-(want.piece.at + want.piece.size) // BLOCK_BYTES))
    yield run


def _read(part: Part, run: list[_Segment], parts: Parts) -> None:
    low, high = blocks_around(part, run[0].piece.at, max(want.piece.at + want.piece.size for want in run))
    done, straight, kept = 0, True, bytearray()
    for at, piece, whole in parts.read(part, low, high):
        if at % BLOCK_BYTES == 0:  # a block begins, perhaps once more
            straight = _is_straight(run[done:], at + BLOCK_BYTES)
            kept = bytearray()
        if straight:
            _deliver(run[done:], at, piece)
        elif not whole or kept:
            kept += piece
        if not whole:
            continue
        if not straight:
            _deliver(run[done:], at + len(piece) - len(kept or piece), kept or piece)
        while done < len(run) and run[done].piece.at + run[done].piece.size <= at + len(piece):
            done += 1


def _is_straight(wants: Iterable[_Segment], end: int) -> bool:
    """Whether all bytes that are wanted before ``end`` go where they go as they are, so that it does no harm if they
    come once more."""
    return all(want.read_range.flat is not None for want in takewhile(lambda want: want.piece.at < end, wants))


def _deliver(wants: Iterable[_Segment], at: int, piece: memoryview | bytearray) -> None:
    """What ``wants`` want of ``piece``, which begins at byte ``at`` of the part."""
    data, end = np.frombuffer(piece, dtype=np.uint8), at + len(piece)
    for want in wants:
        begin = max(at, want.piece.at)
        if begin >= end:
            return
        if (size := min(end, want.piece.at + want.piece.size) - begin) > 0:
            read_range, to, some = (
                want.read_range,
                want.at + begin - want.piece.at,
                data[begin - at : begin - at + size],
            )
            if read_range.flat is not None:
                read_range.flat[to : to + size] = some
            else:
                read_range.deliver(to, torch.frombuffer(some, dtype=torch.uint8))


def _chunk(chunks: Sequence[Chunk], item: ReadItem) -> Chunk:
    offset = item.storage_index.offset
    for chunk in chunks:
        if offset is None or tuple(offset) == chunk.offsets:
            return chunk
    raise Damaged(f"the manifest has no part of {item.storage_index.fqn!r} at {offset}")
