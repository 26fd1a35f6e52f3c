"""This rank's share of a state in host memory: what ``save`` copies, and what is uploaded behind the training's back.

The memory is touched when it is made and used again for every save, because a page that is touched for the first time
costs a multiple of the copy itself. In a process that uses GPUs it is pinned.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch.distributed.tensor import DTensor

from gpuctl.cluster.checkpoints.manifest import Piece
from gpuctl.cluster.concurrency import for_each
from gpuctl.trainers.checkpoint.save.partition import RankPartition, Slice, padded
from gpuctl.trainers.checkpoint.state.state_tensors import StateTensors
from gpuctl.trainers.checkpoint.tensor_bytes import copy_bytes, copy_flat, flat_bytes, is_plain
from gpuctl.trainers.checkpoint.threads import spare_cores
from gpuctl.trainers.gpus import gpus_of, wait_for

PART_BYTES = 16 << 20
"""Of a share of up to ``_MANY`` parts; beyond, they double, up to a bound: each costs a request, and readers memory."""
_MOST_PART_BYTES = 64 << 20
_MANY = 512
_MOST_THREADS = 8
"""That copy at once. One core does not use up what the memory can do, and the training stands meanwhile."""
_WORTH_A_THREAD = 16 << 20
_CUT_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class BufferLayout:
    """The offsets of slices and values in the buffer, and how the buffer is cut into parts."""

    cuts: tuple[int, ...]
    """Where each part begins, and where the last one ends."""
    slices: tuple[tuple[Slice, int], ...]
    """With its offset."""
    values: tuple[tuple[str, int, int], ...]
    """Name, offset and size."""

    @property
    def size(self) -> int:
        return self.cuts[-1]

    def parts(self) -> list[tuple[int, int]]:
        """Begin and end of each part."""
        return list(pairwise(self.cuts))

    def pieces(self, low: int, size: int) -> tuple[Piece, ...]:
        """Bytes ``[low, low + size)`` of the buffer, by this rank's parts."""
        found = []
        part = bisect_right(self.cuts, low) - 1
        while size > 0:
            length = min(size, self.cuts[part + 1] - low)
            found.append(Piece(part, low - self.cuts[part], length))
            low, size, part = low + length, size - length, part + 1
        return tuple(found)


def layout_of(share: RankPartition, values: dict[str, bytes]) -> BufferLayout:
    """Tensors first, those that never change before the others; then values, which change with every save. Each of the
    three in parts of its own."""
    end = 0
    slices = []
    for part in share.slices:
        slices.append((part, end))
        end += padded(part.high - part.low)
    part_bytes = PART_BYTES
    while end > part_bytes * _MANY and part_bytes < _MOST_PART_BYTES:
        part_bytes *= 2
    tensors = end
    frozen = slices[share.frozen][1] if share.frozen < len(slices) else end
    placed = []
    for name in share.values:
        placed.append((name, end, len(values[name])))
        end += padded(len(values[name]))
    begins = (at for low, high in pairwise((0, frozen, tensors, end)) for at in range(low, high, part_bytes))
    return BufferLayout((*begins, end), tuple(slices), tuple(placed))


class HostBuffer:
    """A buffer that grows when it must. Not thread-safe but for ``prepare``, which works in the background."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._preparing: threading.Thread | None = None

    @property
    def bytes(self) -> int:
        return self._buffer.numel()

    def prepare(self, size: int) -> None:
        """Have ``size`` bytes ready before the first save asks for them."""
        if size <= self.bytes:
            return
        self._settle()
        self._preparing = threading.Thread(target=self._grow, args=(size,), name="gpuctl-staging", daemon=True)
        self._preparing.start()

    def fill(self, layout: BufferLayout, contents: StateTensors) -> memoryview:
        """Copy what is laid out from ``contents``; the bytes that are to be written. Returns when they are all there,
        also from a GPU."""
        self._settle()
        if self.bytes < layout.size:
            self._grow(layout.size)
        copies = [
            _CopyTask(
                _local(contents.tensors[part.name]), part.low, part.high, self._buffer[at : at + part.high - part.low]
            )
            for part, at in layout.slices
        ]
        on_gpu = [copy for copy in copies if copy.tensor.is_cuda]
        gpus = gpus_of(copy.tensor for copy in on_gpu)
        wait_for(gpus)  # the last step may have run on another stream than these copies will
        for copy in on_gpu:
            for piece in [copy] if is_plain(copy.tensor) else copy.cut():
                piece.run()
        on_host = [piece for copy in copies if not copy.tensor.is_cuda for piece in copy.cut()]
        threads = min(_MOST_THREADS, spare_cores(torch.get_num_threads()), layout.size // _WORTH_A_THREAD)
        if threads > 1:
            for_each(_CopyTask.run, on_host, threads)
        else:
            for copy in on_host:
                copy.run()
        wait_for(gpus)
        view = memoryview(self._buffer.numpy())  # type: ignore[arg-type]  # numpy's stubs lag behind PEP 688
        for name, at, size in layout.values:
            view[at : at + size] = contents.values[name]
        _clear(view, layout)
        return view[: layout.size].toreadonly()

    def _settle(self) -> None:
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None

    def _grow(self, size: int) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)  # give the old one back first
        self._buffer = torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_initialized()).zero_()


class HostBuffers:
    """The host buffers of one rank: as many saves can be on their way at once."""

    def __init__(self, count: int = 2) -> None:
        self._buffers = [HostBuffer() for _ in range(count)]

    def prepare(self, size: int) -> None:
        """Have ``size`` bytes ready in one of them, so that the first save costs no more than the others."""
        self._buffers[0].prepare(size)

    def other_than(self, taken: Sequence[HostBuffer]) -> HostBuffer | None:
        """One that is not ``taken``; ``None`` if all are."""
        return next((buffer for buffer in self._buffers if all(buffer is not other for other in taken)), None)


@dataclass(frozen=True, slots=True)
class _CopyTask:
    """Bytes ``[low, high)`` of a tensor, to be put at ``to``."""

    tensor: torch.Tensor
    low: int
    high: int
    to: torch.Tensor

    def cut(self) -> Iterator[_CopyTask]:
        for low in range(self.low, self.high, _CUT_BYTES):
            high = min(self.high, low + _CUT_BYTES)
            yield _CopyTask(self.tensor, low, high, self.to[low - self.low : high - self.low])

    def run(self) -> None:
        """Copy; from a GPU the copy is only started."""
        with torch.no_grad():
            if is_plain(self.tensor):
                copy_flat(self.to, flat_bytes(self.tensor)[self.low : self.high], non_blocking=True)
            else:  # row by row where it lies: the whole of it once more may be more memory than there is
                copy_bytes(self.tensor, self.low, self.high, self.to)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _clear(view: memoryview, layout: BufferLayout) -> None:
    """What lies between the slices is zero, whatever an earlier save has left there."""
    ends: Iterable[tuple[int, int]] = [
        *((at, at + part.high - part.low) for part, at in layout.slices),
        *((at, at + size) for _, at, size in layout.values),
    ]
    last = 0
    for low, high in ends:
        if low > last:
            view[last:low] = bytes(low - last)
        last = high
    if layout.size > last:
        view[last : layout.size] = bytes(layout.size - last)
