"""How much of the machine a worker's threads take."""

from __future__ import annotations

import contextlib
import os
import threading

_NICE = 10


def give_way() -> None:
    """Lower the priority of this thread alone, where the system can: the training and its data loaders go first."""
    with contextlib.suppress(OSError, AttributeError):  # Linux can
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


def spare_cores(threads_each: int) -> int:
    """How many threads this worker may run at once that use ``threads_each`` cores each, so that all workers of the
    node have work for its cores and not for more."""
    mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, mine // (int(os.environ.get("LOCAL_WORLD_SIZE") or 1) * threads_each))
