"""How workers are asked to stop: who is signalled when, and when nobody waits for them any more."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence

from gpuctl.cluster.clock import Clock
from gpuctl.trainers.launchers.descendants import catches
from gpuctl.trainers.stack_signal import STACK_SIGNAL

_STACK_S = 0.5
"""For a worker to write down its stack, before it is asked to stop."""
_ALONE_S = 2.0
"""For a launcher whose workers have ended to end as well, before a job that is over ends it."""


class WorkerStop:
    """Asks the workers of a node to stop, each once, until ``deadline``.

    Args:
        clock: the node's.
        deadline: by its monotonic clock, when those that still run are killed.
        listens: whether the worker with this pid catches the signal, so that a stop costs no step.
    """

    def __init__(self, clock: Clock, deadline: float, listens: Callable[[int], bool]) -> None:
        self._clock = clock
        self._deadline = deadline
        self._listens = listens
        self._asked: set[int] = set()
        self._showed: dict[int, float] = {}
        """When each worker was asked for its stack."""
        self._no_workers_since: float | None = None

    @property
    def has_asked(self) -> bool:
        return bool(self._asked)

    def ask(
        self,
        workers: Sequence[int],
        *,
        launched: bool,
        everyone: bool,
        stacks: bool,
        number: int = signal.SIGTERM,
    ) -> bool:
        """Signal those not asked yet; returns whether what still runs is to be killed.

        Call it again on every turn of the loop: a worker that has only just started catches nothing yet.

        Args:
            workers: pids of those that run now.
            launched: whether there is a launcher, which then has these workers and no others.
            everyone: the job ends, so it is for those too that do not catch the signal, and for a launcher without
                workers, which waits for those of other nodes.
            stacks: workers write their stacks into their logs first.
            number: by which signal they are asked.
        """
        now = self._clock.monotonic()
        for pid in workers:
            if stacks and pid not in self._showed:
                self._showed[pid] = now
                if STACK_SIGNAL and catches(pid, STACK_SIGNAL):
                    _signal(pid, STACK_SIGNAL)
            if stacks and now - self._showed[pid] < _STACK_S:
                continue
            if pid not in self._asked and (everyone or self._listens(pid)):
                self._asked.add(pid)
                _signal(pid, number)
        if workers or not launched:
            self._no_workers_since = None
        elif self._no_workers_since is None:
            self._no_workers_since = now
        alone = self._no_workers_since is not None and now - self._no_workers_since > _ALONE_S
        return now > self._deadline or (everyone and alone)


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
