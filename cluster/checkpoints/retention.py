"""Which checkpoints stay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gpuctl.cluster.errors import BadInput
from gpuctl.cluster.records.checkpoints import CheckpointEntry


@dataclass(frozen=True, slots=True)
class Retention:
    """Which checkpoints are kept: those that any of the rules keeps. The newest stays whatever they say: it is what a
    restart needs."""

    last: int | None = 3
    """So many of the newest; ``None``: all."""
    every: int | None = None
    """Besides, the first one of each so many steps: with 1000 those of step 1000, 2000 …, and where a notice came in
    between and shifted them, the next one after."""
    best: str | None = None
    """Besides, the one with the best value of this metric; of equals, the newest."""
    best_is: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        for name, number in (("last", self.last), ("every", self.every)):
            if number is not None and number < 1:
                raise BadInput(f"{name}={number} keeps no checkpoints", "use 1 or more")

    def kept(self, entries: Sequence[CheckpointEntry]) -> tuple[CheckpointEntry, ...]:
        """Those of ``entries`` (oldest first) that stay, in the same order."""
        if self.last is None:
            return tuple(entries)
        steps = {entry.step for entry in entries[-self.last :]}
        if self.every is not None:
            first_of = {entry.step // self.every: entry.step for entry in reversed(entries) if entry.step >= self.every}
            steps |= set(first_of.values())
        if (best := self._best(entries)) is not None:
            steps.add(best.step)
        return tuple(entry for entry in entries if entry.step in steps)

    def _best(self, entries: Sequence[CheckpointEntry]) -> CheckpointEntry | None:
        name = self.best
        if name is None:
            return None
        sign = 1 if self.best_is == "max" else -1
        told = [entry for entry in entries if name in entry.metrics]
        return max(told, key=lambda entry: (sign * entry.metrics[name], entry.step), default=None)
