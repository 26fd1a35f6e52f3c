"""A job that hangs: no step, and nothing works, for so long that it is not going to.

Both have to hold, on every node of the round: a step may take hours, and a script may be busy for hours before its
first. A script that tells of no steps is judged by its work alone. Rank 0 decides (``cluster.membership.rounds``): the
workers are asked for a last checkpoint, and the job ends as failed.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import psutil

from gpuctl.bootstrap.boot.idle import BUSY_GPU, gpu_use
from gpuctl.cluster.clock import Clock

EVERY_S = 10.0
BUSY_CORES = 0.05
"""Of each worker: one that waits has threads that look around, and nothing more."""


class WatchedRun(Protocol):
    """What ``StallWatch`` needs of a ``RoundRun``."""

    def activity(self) -> Activity | None:
        """``None``: there are no workers, or not yet."""
        ...


@dataclass(frozen=True, slots=True)
class Activity:
    """The progress of a node's workers, and the work they did for it."""

    workers: int
    step: int | None
    cpu_s: float


class StallTimer:
    """Measures how long nothing has happened. ``look`` again and again; times are monotonic seconds.

    ``after_s``: how long a job may do nothing; 0: for ever.
    """

    def __init__(self, after_s: float, gpu_load: Callable[[], float] = gpu_use) -> None:
        self.still_s = 0.0
        """For how long nothing had happened when it last looked."""
        self._after_s = after_s
        self._gpu_load = gpu_load
        self._last: tuple[float, Activity] | None = None
        self._still_since: float | None = None

    def look(self, now: float, activity: Activity | None) -> bool:
        """Whether the job is stalled. The GPUs are asked only where nothing else is going on."""
        before, self._last = self._last, (now, activity) if activity else None
        if activity is None or before is None or self._works(now - before[0], before[1], activity):
            self._still_since = None
            self.still_s = 0.0
            return False
        if self._still_since is None:
            self._still_since = before[0]
        self.still_s = now - self._still_since
        return 0 < self._after_s <= self.still_s

    def _works(self, seconds: float, before: Activity, now: Activity) -> bool:
        if now.step != before.step or now.workers != before.workers:
            return True
        if now.cpu_s - before.cpu_s >= BUSY_CORES * now.workers * max(seconds, 0.1):
            return True
        return self._gpu_load() >= BUSY_GPU


def cpu_seconds(pids: Sequence[int]) -> float:
    """That these processes, and all below them, have used."""
    used = 0.0
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    used += sum(process.cpu_times()[:4])  # user, system, and both of the children that ended
    return used


class StallWatch:
    """Watches one run for stalls, on a thread, until it is ``stop``ped: asking GPUs may take a while."""

    def __init__(
        self, run: WatchedRun, after_s: float, clock: Clock, on_change: Callable[[], None], say: Callable[[str], None]
    ) -> None:
        self.stalled = False
        self._timer = StallTimer(after_s)
        self._run = run
        self._after_s = after_s
        self._clock = clock
        self._on_change = on_change
        self._say = say
        self._ended = threading.Event()

    @property
    def still_s(self) -> float:
        """Seconds for which nothing had happened when it last looked."""
        return self._timer.still_s

    def start(self) -> None:
        threading.Thread(target=self._watch, name="stall", daemon=True).start()

    def stop(self) -> None:
        self._ended.set()

    def _watch(self) -> None:
        while not self._ended.wait(min(EVERY_S, self._after_s / 4) if self._after_s else EVERY_S):
            stalled = self._timer.look(self._clock.monotonic(), self._run.activity())
            if stalled != self.stalled:
                self.stalled = stalled
                idle = f"stalled: no step and no work for {self._after_s / 60:g} minutes"
                self._say(idle if stalled else "no longer stalled")
                self._on_change()
