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

from gpuctl.cluster.checkpoints.manifest import BLOCK_BYTES, Part, Piece
from gpuctl.trainers.checkpoint.dcp.partition import check
from gpuctl.trainers.checkpoint.save.host_buffer import BufferLayout
from gpuctl.trainers.checkpoint.save.partition import Box, padded
from gpuctl.trainers.checkpoint.save.report import RankReport, SliceReport
from gpuctl.trainers.checkpoint.save.uploader import TransferLimits
from gpuctl.trainers.checkpoint.tensor_bytes import copy_bytes

_SHARE_OF_MEMORY = 16
_MOST_PART_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class TensorRange:
    """Bytes ``[low, high)`` of a tensor's box, in row-major order."""

    name: str
    box: Box
    low: int
    high: int
    tensor: Callable[[], Tensor]
    """Finds the box; more than once where it lies in several parts."""


def part_bytes(limits: TransferLimits) -> int:
    """So that the ten parts that a save holds at most stay within the limit."""
    return max(BLOCK_BYTES, min(_MOST_PART_BYTES, limits.memory_bytes // _SHARE_OF_MEMORY // BLOCK_BYTES * BLOCK_BYTES))


class PartStream:
    """Tensor ranges end to end, each at a multiple of ``ALIGN``, cut into parts of ``size`` bytes."""

    def __init__(self, tensor_ranges: Sequence[TensorRange], size: int) -> None:
        self._placed: list[tuple[TensorRange, int]] = []
        end = 0
        for one in tensor_ranges:
            self._placed.append((one, end))
            end += padded(one.high - one.low)
        self._laid = BufferLayout((*range(0, end, size), end), (), ())
        self._next = 0
        self._found: tuple[TensorRange, Tensor] | None = None

    def parts(self, prefix: str) -> Iterator[tuple[str, memoryview]]:
        """Key and bytes of each part, which is filled when it is asked for, and forgotten then. Once only.

        Raises ``BadInput`` if a tensor is not what was planned.
        """
        for number, (begin, end) in enumerate(self._laid.parts()):
            yield f"{prefix}-{number:04d}", self._filled(begin, end)

    def reports(self, step: int, parts: Sequence[Part]) -> list[RankReport]:
        """Reports for each tensor range, once ``parts`` are in the bucket."""
        return [self._report(step, one, at, parts) for one, at in self._placed]

    def _report(self, step: int, one: TensorRange, at: int, parts: Sequence[Part]) -> RankReport:
        pieces = self._laid.pieces(at, one.high - one.low)
        if not pieces:
            return RankReport(step=step, boxes={one.name: one.box})
        first, last = pieces[0].part, pieces[-1].part
        placed = tuple(Piece(piece.part - first, piece.at, piece.size) for piece in pieces)
        return RankReport(
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

    def _tensor(self, one: TensorRange) -> Tensor:
        """A planner may make a new tensor each time that it is asked."""
        if self._found is None or self._found[0] is not one:
            self._found = None
            tensor = one.tensor().detach()
            check(one.name, tensor, one.box)
            self._found = one, tensor
        return self._found[1]
