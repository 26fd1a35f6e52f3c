"""Small exchanges among all ranks, in a process group of the checkpointer's own.

The group is gloo: NCCL takes no objects from the host, and the default group is the training's. In a world of one every
exchange is with oneself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from gpuctl.cluster.errors import Damaged, GpuctlError
from gpuctl.trainers import gloo_exit
from gpuctl.trainers.world import World

T = TypeVar("T")


class Ranks:
    """The ranks of a round, as checkpoints need them. All ranks make the same calls in the same order."""

    def __init__(self) -> None:
        self._group: dist.ProcessGroup | None = None

    def join(self) -> World:
        """Make the group, once. Raises ``BadInput`` in one of several workers without a process group."""
        world = World.now()
        if world.size > 1 and self._group is None:
            self._group = dist.new_group(backend="gloo")
            gloo_exit.install()
        return world

    def barrier(self) -> None:
        """Wait for all ranks; before ``join`` in the default group."""
        if World.now().size > 1:
            dist.barrier(group=self._group)

    def gather_ints(self, values: Sequence[int]) -> list[list[int]]:
        """``values`` of each rank, in rank order: int64, and of one length on all ranks."""
        mine = torch.tensor(values)
        everyone = [mine]
        size = World.now().size
        if size > 1:
            everyone = [torch.empty_like(mine) for _ in range(size)]
            dist.all_gather(everyone, mine, group=self._group)
        return [of.tolist() for of in everyone]

    def gather(self, value: T) -> list[T]:
        """``value`` of each rank, in rank order."""
        size = World.now().size
        everyone = [value] * size
        if size > 1:
            dist.all_gather_object(everyone, value, group=self._group)
        return everyone

    def number_of_rank0(self, value: int) -> int:
        """``value`` as rank 0 has it, on every rank."""
        if World.now().size == 1:
            return value
        number = torch.tensor([value])
        dist.broadcast(number, 0, group=self._group)
        return int(number)

    def on_rank0(self, call: Callable[[], T] | None) -> T:
        """What ``call`` returns on rank 0, or the ``GpuctlError`` that it raises there, on every rank. ``None`` on the
        other ranks."""
        answer: list[object] = [None]
        if call is not None:
            try:
                answer = [call()]
            except GpuctlError as error:
                answer = [error]
        if World.now().size > 1:
            dist.broadcast_object_list(answer, src=0, group=self._group)
        if isinstance(answer[0], GpuctlError):
            raise answer[0]
        return answer[0]  # type: ignore[return-value]

    def together(self, call: Callable[[], None]) -> None:
        """``call`` on every rank; what it raised on any is raised on all. ``Damaged`` gives way to any other error."""
        raised: Exception | None = None
        try:
            call()
        except Exception as error:  # noqa: BLE001 - raised below, here or from another rank
            raised = error
        errors = [error for error in self.gather(raised) if error is not None]
        if errors:
            raise min(errors, key=lambda error: isinstance(error, Damaged)) from raised
