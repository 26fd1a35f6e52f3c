"""Being asked to stop: SIGTERM raises a flag, and all ranks agree on one step to stop at.

Undisturbed, a step boundary costs a look at a Python bool. Once its flag is up, a rank asks the job's TCPStore at every
boundary. *Boundary b* is the moment between optimizer steps with b steps done. At a boundary, a flagged rank

1. adds one to ``acks``, once;
2. if it is global rank 0, ``stop_at`` is not set, and ``acks`` has reached the world size: sets ``stop_at`` to b + 1;
3. stops if ``stop_at`` is set and b has reached it.

Why all stop at the same step, given that training is in lock step (no rank completes a step before every rank has
begun to take part in it, as the all-reduce of the gradients has it): rank 0 sets ``stop_at`` at its boundary b, before
it takes part in the next step. So no rank is past boundary b then, and every rank, having added to ``acks``, looks at
the store at every boundary from now on. A rank reaches boundary b + 1 only after rank 0 took part in that step, which
is after ``stop_at`` was set; so it sees it there, and not having passed b + 1, it stops there. A rank that sees it
already at boundary b goes on for one step, since b < b + 1.

On a GPU the host runs ahead of the all-reduce, so a flagged rank waits for its device before it looks.

If some rank is never signalled, ``acks`` never reaches the world size and training goes on: whoever signals must signal
all, and kills when the time is up.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import weakref
from datetime import timedelta
from types import FrameType

from torch.distributed import Store

from gpuctl.cluster import worker_context
from gpuctl.cluster.worker_context import WorkerContext
from gpuctl.trainers.gpus import gpus_in_use, wait_for
from gpuctl.trainers.world import World, job_store

_PATIENCE = timedelta(seconds=30)
_listening: weakref.WeakSet[StopSignal] = weakref.WeakSet()


def is_asked() -> bool:
    """Whether this process was asked to stop, whatever the other ranks know of it."""
    return any(listener._flag for listener in _listening)


def agree() -> None:
    """All ranks have told each other, at a boundary where all of them are, that they were asked: this boundary is the
    last. For training that is not in lock step between such boundaries; all ranks make the call."""
    for listener in _listening:
        listener._agreed_by_all = listener._flag


class StopSignal:
    """This process's request to stop, and the ranks' agreement on it. ``listen`` before the first step, ``should_stop``
    at every boundary."""

    def __init__(self) -> None:
        self._flag = False
        self._context = WorkerContext.from_env()
        self._local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self._store: Store | None = None
        self._stop_at: int | None = None
        self._agreed_by_all = False

    def listen(self) -> bool:
        """Take SIGTERM from now on, and tell the agent so. ``False`` outside the main thread, where Python does not
        allow it: the worker is then simply ended by the signal."""
        if threading.current_thread() is not threading.main_thread():
            return False
        signal.signal(signal.SIGTERM, self._on_signal)
        _listening.add(self)
        # The file comes second: whoever sees it may rely on the handler.
        self._mark(worker_context.AWARE)
        return True

    def should_stop(self, step: int) -> bool:
        """Whether this is the boundary (``step`` steps are done) at which all ranks stop. Call it at every boundary."""
        return self._flag and (self._agreed_by_all or self._agreed(step))

    def drained(self) -> None:
        """Tell the agent that the last checkpoint is committed, so that exit code 0 is not taken for the end."""
        self._mark(worker_context.DRAINED)

    def _agreed(self, step: int) -> bool:
        world = World.now()
        if world.size == 1:
            return True
        wait_for(gpus_in_use())
        if self._stop_at is None:
            self._stop_at = self._ask(step, world)
        return self._stop_at is not None and step >= self._stop_at

    def deadline(self) -> float | None:
        """When the workers are killed, on the monotonic clock; ``None`` if unknown."""
        if self._context is None:
            return None
        try:
            return float((self._context.round_dir / worker_context.DEADLINE).read_text())
        except (OSError, ValueError):
            return None

    def _ask(self, step: int, world: World) -> int | None:
        if self._store is None:
            self._store = job_store("notice", _PATIENCE)
            self._store.add("acks", 1)
        if self._store.check(["stop_at"]):
            return int(self._store.get("stop_at"))
        if world.rank == 0 and self._store.add("acks", 0) >= world.size:
            self._store.set("stop_at", str(step + 1))
            return step + 1
        return None

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._flag = True

    def _mark(self, name: str) -> None:
        if self._context is not None:
            with contextlib.suppress(FileNotFoundError):  # the agent has cleared the round away
                (self._context.round_dir / f"{name}.{self._local_rank}").touch()
