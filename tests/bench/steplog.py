"""Reading what ``steps.py`` writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from tests.waiting import until


@dataclass(frozen=True, slots=True)
class Mark:
    """One line of the log. ``at`` is in seconds of the machine's monotonic clock."""

    what: str
    step: int
    at: float
    round: int
    rank: int
    world: int
    pid: int


class StepLog:
    """Reads on from where it was each time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._marks: list[Mark] = []

    def marks(self) -> list[Mark]:
        """All marks so far, in the order in which they were written."""
        if self.path.exists():
            with self.path.open("rb") as file:
                file.seek(self._offset)
                new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            self._offset += len(whole)
            self._marks += [_parsed(line) for line in whole.decode().splitlines()]
        return self._marks

    def steps(self) -> list[Mark]:
        return [mark for mark in self.marks() if mark.what == "step"]

    def pids(self) -> set[int]:
        return {mark.pid for mark in self.marks()}

    def wait_for_steady(self, world: int, steps: int = 40, patience_s: float = 60.0) -> None:
        """Until the newest processes are ``world`` in number and have made ``steps`` steps each."""
        until(lambda: self._is_steady(world, steps), f"{steps} steps of {world} workers", patience_s)

    def _is_steady(self, world: int, steps: int) -> bool:
        newest: dict[int, Mark] = {mark.rank: mark for mark in self.marks() if mark.what == "begin"}
        made = [sum(mark.pid == newest[rank].pid for mark in self.steps()) for rank in newest if rank < world]
        return len(made) == world and newest[0].world == world and min(made) >= steps

    def first_step_of_new(self, old: set[int]) -> Mark | None:
        """The first optimizer step of a process that is not one of ``old``."""
        return next((mark for mark in self.marks() if mark.what == "step" and mark.pid not in old), None)

    def step_time(self, since: float, before: float) -> float:
        """Median seconds between two steps of one process."""
        gaps: list[float] = []
        for pid in self.pids():
            times = [mark.at for mark in self.steps() if mark.pid == pid and since <= mark.at < before]
            gaps += [b - a for a, b in pairwise(times)]
        return median(gaps) if gaps else 0.0

    def longest_gap(self, since: float, before: float) -> float:
        """Longest time in which no process finished a step."""
        times = sorted(mark.at for mark in self.steps() if since <= mark.at < before)
        return max((b - a for a, b in pairwise([since, *times])), default=before - since)


def spread(samples: Sequence[float]) -> str:
    return f"{min(samples):.3g}-{max(samples):.3g}" if len(samples) > 1 else ""


def _parsed(line: str) -> Mark:
    what, step, at, round_, rank, world, pid = line.split()
    return Mark(what, int(step), float(at), int(round_), int(rank), int(world), int(pid))
