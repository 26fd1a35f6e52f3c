"""This rank's share of a state in host memory: what ``save`` copies, and what is uploaded behind the training's back.

The memory is touched when it is made and used again for every save, because a page that is touched for the first time
costs a multiple of the copy itself. On a GPU machine it is pinned.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch.distributed.tensor import DTensor

from gpuctl.cluster.manifest import Piece
from gpuctl.trainers.raw import copy_bytes, copy_flat, flat_bytes, is_plain
from gpuctl.trainers.shares import ALIGN, Share, Slice
from gpuctl.trainers.state import Contents
from gpuctl.trainers.threads import in_threads, spare_cores

PART_BYTES = 16 << 20
"""Of a share of up to ``_MANY`` parts; beyond, they double, up to a bound: each costs a request, and readers memory."""
_MOST_PART_BYTES = 64 << 20
_MANY = 512
_MOST_THREADS = 8
"""That copy at once. One core does not use up what the memory can do, and the training stands meanwhile."""
_WORTH_A_THREAD = 16 << 20
_CUT_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Laid:
    """Where each slice and value lies in the buffer, and how the buffer is cut into parts."""

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


def lay(share: Share, values: dict[str, bytes]) -> Laid:
    """Tensors first, those that never change before the others; then values, which change with every save. Each of the
    three in parts of its own."""
    end = 0
    slices = []
    for part in share.slices:
        slices.append((part, end))
        end += _up(part.high - part.low)
    part_bytes = PART_BYTES
    while end > part_bytes * _MANY and part_bytes < _MOST_PART_BYTES:
        part_bytes *= 2
    tensors = end
    frozen = slices[share.frozen][1] if share.frozen < len(slices) else end
    placed = []
    for name in share.values:
        placed.append((name, end, len(values[name])))
        end += _up(len(values[name]))
    begins = (at for low, high in pairwise((0, frozen, tensors, end)) for at in range(low, high, part_bytes))
    return Laid((*begins, end), tuple(slices), tuple(placed))


class Staging:
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

    def fill(self, laid: Laid, contents: Contents) -> memoryview:
        """Copy what is laid out from ``contents``; the bytes that are to be written. Returns when they are all there,
        also from a GPU."""
        self._settle()
        if self.bytes < laid.size:
            self._grow(laid.size)
        copies = [
            _Copy(
                _local(contents.tensors[part.name]), part.low, part.high, self._buffer[at : at + part.high - part.low]
            )
            for part, at in laid.slices
        ]
        on_gpu = [copy for copy in copies if copy.tensor.is_cuda]
        for copy in on_gpu:
            for piece in [copy] if is_plain(copy.tensor) else copy.cut():
                piece.run()
        on_host = [piece for copy in copies if not copy.tensor.is_cuda for piece in copy.cut()]
        threads = min(_MOST_THREADS, spare_cores(torch.get_num_threads()), laid.size // _WORTH_A_THREAD)
        if threads > 1:
            in_threads(_Copy.run, on_host, threads)
        else:
            for copy in on_host:
                copy.run()
        if on_gpu:
            torch.cuda.synchronize()
        view = memoryview(self._buffer.numpy())  # type: ignore[arg-type]  # numpy's stubs lag behind PEP 688
        for name, at, size in laid.values:
            view[at : at + size] = contents.values[name]
        _clear(view, laid)
        return view[: laid.size].toreadonly()

    def _settle(self) -> None:
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None

    def _grow(self, size: int) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)  # give the old one back first
        self._buffer = torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available()).zero_()


@dataclass(frozen=True, slots=True)
class _Copy:
    """Bytes ``[low, high)`` of a tensor, to be put at ``to``."""

    tensor: torch.Tensor
    low: int
    high: int
    to: torch.Tensor

    def cut(self) -> Iterator[_Copy]:
        for low in range(self.low, self.high, _CUT_BYTES):
            high = min(self.high, low + _CUT_BYTES)
            yield _Copy(self.tensor, low, high, self.to[low - self.low : high - self.low])

    def run(self) -> None:
        """From a GPU it is only begun."""
        with torch.no_grad():
            if is_plain(self.tensor):
                copy_flat(self.to, flat_bytes(self.tensor)[self.low : self.high], non_blocking=True)
            else:  # row by row where it lies: the whole of it once more may be more memory than there is
                copy_bytes(self.tensor, self.low, self.high, self.to)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _clear(view: memoryview, laid: Laid) -> None:
    """What lies between the slices is zero, whatever an earlier save has left there."""
    ends: Iterable[tuple[int, int]] = [
        *((at, at + part.high - part.low) for part, at in laid.slices),
        *((at, at + size) for _, at, size in laid.values),
    ]
    last = 0
    for low, high in ends:
        if low > last:
            view[last:low] = bytes(low - last)
        last = high
    if laid.size > last:
        view[last : laid.size] = bytes(laid.size - last)


def _up(size: int) -> int:
    return -(-size // ALIGN) * ALIGN
