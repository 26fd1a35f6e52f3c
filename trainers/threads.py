"""Work for several threads at once, which end with it.

Not a ``ThreadPoolExecutor``: that takes no work once the main thread has ended, and a last save goes on then.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")
U = TypeVar("U")

_NICE = 10


def in_threads(
    call: Callable[[T], U], items: Iterable[T], threads: int, first: Callable[[], None] = lambda: None
) -> list[U]:
    """``call`` of each item, in order, in so many threads, each of which calls ``first`` first. Raises what the first
    failure raised, once no call is running any more."""
    counted = itertools.count()
    waiting = zip(items, counted, strict=False)  # one by one: an item may hold much memory
    lock = threading.Lock()
    results: dict[int, U] = {}
    failures: list[BaseException] = []

    def work() -> None:
        try:
            first()
            while not failures:
                with lock:
                    numbered = next(waiting, None)
                if numbered is None:
                    return
                item, number = numbered
                results[number] = call(item)
        except BaseException as error:  # noqa: BLE001 - raised below, in the caller's thread
            failures.append(error)

    workers = [threading.Thread(target=work, name=f"gpuctl-part-{n}") for n in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if failures:
        raise failures[0]
    return [results[number] for number in range(next(counted))]


def give_way() -> None:
    """Lower the priority of this thread alone, where the system can: the training and its data loaders go first."""
    with contextlib.suppress(OSError, AttributeError):  # Linux can
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


def spare_cores(threads_each: int) -> int:
    """How many threads this worker may run at once that use ``threads_each`` cores each, so that all workers of the
    node have work for its cores and not for more."""
    mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, mine // (int(os.environ.get("LOCAL_WORLD_SIZE") or 1) * threads_each))
