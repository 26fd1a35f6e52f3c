"""What the ranks agree on before a save: which rank writes what, and when the next save is due.

One small exchange tells whether all ranks hold the same; only if they do not, they tell each other what they hold.
"""

from __future__ import annotations

from dataclasses import dataclass

import xxhash

from gpuctl.cluster.errors import BadInput
from gpuctl.trainers.checkpoint.ranks import Ranks
from gpuctl.trainers.checkpoint.save.partition import (
    RankPartition,
    held_of,
    partition_of,
    placement_of,
    signature,
)
from gpuctl.trainers.checkpoint.state.state_tensors import State, StateTensors, contents_of
from gpuctl.trainers.world import World


@dataclass(frozen=True, slots=True)
class SavePlan:
    """A save that all ranks have agreed on."""

    contents: StateTensors
    partition: RankPartition
    in_flight: int
    """The largest number of saves that any rank has on its way."""
    next_step: int
    """The step at which the next save is due, as rank 0 has it."""


class SavePlanner:
    """Plans the saves of one rank. It remembers the partition of a state that does not change its shapes."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._partitions: dict[str, RankPartition] = {}

    def plan(self, step: int, state: State, *, in_flight: int, next_step: int) -> SavePlan:
        """Agree with the other ranks on the save of ``step``.

        Args:
            step: optimizer steps done; the same on all ranks.
            state: see ``Checkpointer``.
            in_flight: saves that this rank has on its way.
            next_step: what rank 0 proposes; ignored on other ranks.

        Raises ``BadInput`` if a rank cannot keep its state, or they save different steps.
        """
        world = World.now()
        contents, refused = StateTensors({}, set(), set(), {}), None
        try:
            contents = contents_of(state, world.rank)
        except BadInput as error:
            refused = error
        text = signature(contents)
        digest = xxhash.xxh3_64_intdigest(text.encode()) >> 1
        everyone = self._ranks.gather_ints((-1 if refused else step, in_flight, digest, next_step))
        steps, flights, digests = ([of[i] for of in everyone] for i in range(3))
        if refused:
            raise refused
        if set(steps) != {step}:
            raise BadInput(f"the ranks save different steps: {steps}", "-1 is one that could not; see its own error")
        alike = len(set(digests)) == 1
        if not alike:  # and not kept: the next save may find them alike
            placement = placement_of(self._ranks.gather(held_of(contents)))
            partition = partition_of(contents, world.rank, world.size, placement)
        else:
            if text not in self._partitions:
                self._partitions = {text: partition_of(contents, world.rank, world.size)}
            partition = self._partitions[text]
        return SavePlan(contents, partition, max(flights), everyone[0][3])
