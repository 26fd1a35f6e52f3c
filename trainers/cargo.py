"""What one rank writes of a save that torch.distributed.checkpoint has planned, put into parts one after the other.

The tensors are not copied before: a part is filled when an upload is free to take it, from wherever they are. So a save
needs the memory of the parts that are on their way, however large the state is.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpuctl.cluster.manifest import BLOCK_BYTES, Part, Piece
from gpuctl.trainers.raw import copy_bytes
from gpuctl.trainers.reports import Report, SliceReport
from gpuctl.trainers.shares import ALIGN, Box
from gpuctl.trainers.staging import Laid
from gpuctl.trainers.stretches import check
from gpuctl.trainers.uploading import Limits

_SHARE_OF_MEMORY = 16
_MOST_PART_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Goods:
    """Bytes ``[low, high)`` of a tensor's box, in row-major order."""

    name: str
    box: Box
    low: int
    high: int
    tensor: Callable[[], Tensor]
    """Finds the box; more than once where it lies in several parts."""


def part_bytes(limits: Limits) -> int:
    """So that the ten parts that a save holds at most stay within the limit."""
    return max(BLOCK_BYTES, min(_MOST_PART_BYTES, limits.memory_bytes // _SHARE_OF_MEMORY // BLOCK_BYTES * BLOCK_BYTES))


class Cargo:
    """Goods end to end, each at a multiple of ``ALIGN``, cut into parts of ``size`` bytes."""

    def __init__(self, goods: Sequence[Goods], size: int) -> None:
        self._placed: list[tuple[Goods, int]] = []
        end = 0
        for one in goods:
            self._placed.append((one, end))
            end += -(-(one.high - one.low) // ALIGN) * ALIGN
        self._laid = Laid((*range(0, end, size), end), (), ())
        self._next = 0
        self._found: tuple[Goods, Tensor] | None = None

    def parts(self, prefix: str) -> Iterator[tuple[str, memoryview]]:
        """Key and bytes of each part, which is filled when it is asked for, and forgotten then. Once only.

        Raises ``BadInput`` if a tensor is not what was planned.
        """
        for number, (begin, end) in enumerate(self._laid.parts()):
            yield f"{prefix}-{number:04d}", self._filled(begin, end)

    def reports(self, step: int, parts: Sequence[Part]) -> list[Report]:
        """Of each of the goods, once ``parts`` are in the bucket."""
        return [self._report(step, one, at, parts) for one, at in self._placed]

    def _report(self, step: int, one: Goods, at: int, parts: Sequence[Part]) -> Report:
        pieces = self._laid.pieces(at, one.high - one.low)
        if not pieces:
            return Report(step=step, boxes={one.name: one.box})
        first, last = pieces[0].part, pieces[-1].part
        placed = tuple(Piece(piece.part - first, piece.at, piece.size) for piece in pieces)
        return Report(
            step=step,
            parts=tuple(parts[first : last + 1]),
            boxes={one.name: one.box},
            slices=(SliceReport(one.name, one.low, placed),),
        )

    def _filled(self, begin: int, end: int) -> memoryview:
        # Mapped, since what is freed to the allocator of one of many threads may be lost to the others.
        memory = mmap.mmap(-1, end - begin)
        room = torch.frombuffer(memory, dtype=torch.uint8)
        with torch.no_grad():
            for one, at in self._placed[self._next :]:
                if at >= end:
                    break
                low, high = max(at, begin), min(at + one.high - one.low, end)
                if low < high:
                    from_ = one.low - at
                    copy_bytes(self._tensor(one), low + from_, high + from_, room[low - begin : high - begin])
                if at + one.high - one.low <= end:
                    self._next += 1
        return memoryview(memory)

    def _tensor(self, one: Goods) -> Tensor:
        """A planner may make a new tensor each time that it is asked."""
        if self._found is None or self._found[0] is not one:
            self._found = None
            tensor = one.tensor().detach()
            check(one.name, tensor, one.box)
            self._found = one, tensor
        return self._found[1]
