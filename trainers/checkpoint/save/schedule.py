"""How often to save: as the user says, or from what saves cost and how often machines are lost without a word.

Young's rule: with C seconds of training lost to each save and M seconds between failures, an interval of sqrt(2 C M)
loses least (J. W. Young, CACM 17(9), 1974; J. T. Daly's refinement, FGCS 22(3), 2006, differs by less than C/2). Here C
is only what blocks the loop, since the upload goes on behind it. A loss that was announced early enough for a last
checkpoint costs no steps, and does not count. Before anything was observed, M is taken to be six hours.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from gpuctl.cluster.records.rounds import Round

PRIOR_S = 6 * 3600.0
_FIRST_STEPS = 10
_LEAST_S = 1.0


@dataclass(frozen=True, slots=True)
class FailureHistory:
    """The failures of a job so far."""

    running_s: float = 0.0
    unannounced: int = 0
    announced: int = 0
    lead_s: float = math.inf
    """The shortest time that workers had for a last checkpoint."""

    @classmethod
    def of(cls, history: Iterable[Round], now: float) -> FailureHistory:
        """The failures in a job's rounds, as its ledger has them. Wall clocks of several machines: good enough for an
        estimate."""
        begun, lead_s = now, math.inf
        unannounced: set[int] = set()
        announced: set[int] = set()
        for round_ in history:
            if round_.number < 1:
                continue
            begun = min(begun, round_.at)
            if round_.phase == "drain":
                announced.add(round_.number)
                lead_s = min(lead_s, round_.drain_s)
            elif round_.number > 1 and " lost" in round_.reason:
                unannounced.add(round_.number)
        return cls(max(0.0, now - begun), len(unannounced), len(announced), lead_s)

    def between_s(self, saving_s: float) -> float:
        """Expected time between two losses that cost steps, if a save takes ``saving_s`` until it is committed."""
        count = self.unannounced + (self.announced if self.lead_s < saving_s else 0)
        return (self.running_s + PRIOR_S) / (count + 1)


@dataclass(frozen=True, slots=True)
class Cadence:
    """The steps between two saves, and why."""

    steps: int
    why: str


def plan(step_s: float, blocked_s: float, saving_s: float, losses: FailureHistory) -> Cadence:
    """Young's interval, but not less than a save takes until it is committed: only one is on its way at a time."""
    between_s = losses.between_s(saving_s)
    ideal_s = math.sqrt(2 * max(blocked_s, 1e-4) * between_s)
    interval_s = max(ideal_s, saving_s, _LEAST_S)
    steps = max(1, round(interval_s / max(step_s, 1e-6)))
    why = (
        f"a save blocks the loop for {blocked_s:.3g} s and is committed after {saving_s:.3g} s, and a loss that "
        f"costs steps is expected every {between_s / 3600:.2g} h ({losses.unannounced} without notice in "
        f"{losses.running_s / 3600:.2g} h): sqrt(2 x {blocked_s:.3g} s x {between_s:.0f} s) = {ideal_s:.3g} s"
    )
    return Cadence(steps, why)


class SaveSchedule:
    """Decides when the next save is due. On rank 0 it measures and decides; the others are told (``agreed``).

    ``every`` is a number of steps, ``"auto"``, or ``None`` for never. ``losses`` is asked on rank 0 before each plan.
    """

    def __init__(
        self,
        every: int | Literal["auto"] | None,
        losses: Callable[[], FailureHistory] = FailureHistory,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._every = every
        self._losses = losses
        self._now = now
        self._asked: int | None = None
        self._since: tuple[int, float] | None = None
        self._next: int | None = None
        self._blocked_s: float | None = None
        self._saving_s = 0.0
        self.plan: Cadence | None = None
        self._told_steps = 0

    @property
    def on(self) -> bool:
        return self._every is not None

    @property
    def is_auto(self) -> bool:
        return self._every == "auto"

    def begin(self, step: int) -> None:
        """``step`` steps are done as the training begins."""
        self._asked = step

    def is_due(self, step: int) -> bool:
        """Call it with the number of steps done: after each step, or after those where a save is possible."""
        if self._every is None:
            return False
        if self._every != "auto":
            before = step - 1 if self._asked is None or self._asked >= step else self._asked
            self._asked = step
            return step // self._every > before // self._every
        if self._since is None:
            self._since = (step, self._now())
            self._next = step + _FIRST_STEPS
        assert self._next is not None
        return step >= self._next

    def propose(self, step: int) -> int:
        """Decide, on rank 0 as a save is due, the step of the one after it."""
        if self._every != "auto" or self._since is None:
            return 0
        first, at = self._since
        step_s = (self._now() - at) / max(1, step - first)
        self.plan = plan(step_s, self._blocked_s or step_s, self._saving_s, self._losses())
        if self._blocked_s is None:  # the first save has yet to show what it costs
            return step + min(self.plan.steps, _FIRST_STEPS)
        return step + self.plan.steps

    def agreed(self, step: int) -> None:
        """What rank 0 has proposed."""
        self._next = step

    def saved(self, step: int, blocked_s: float) -> None:
        """A save after ``step`` has held the loop up for ``blocked_s``, which is no part of a step's time."""
        self._blocked_s = blocked_s
        self._since = (step, self._now())

    def committed(self, saving_s: float) -> None:
        self._saving_s = saving_s

    def changed(self) -> Cadence | None:
        """The cadence on rank 0, when it differs by a quarter from what was returned last; else ``None``."""
        if self.plan is None or abs(self.plan.steps - self._told_steps) <= 0.25 * self._told_steps:
            return None
        self._told_steps = self.plan.steps
        return self.plan
