"""Work for several threads at once, which end with it.

Not a ``ThreadPoolExecutor``: that takes no work once the main thread has ended, and a last save goes on then.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from itertools import islice
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

READS_AT_ONCE = 6
"""Objects of some MiB from the bucket: with blocks of a checkpoint 6 MiB, of which the allocator makes about twice."""
_PATIENCE_S = 2.0


def for_each(
    do: Callable[[T], object],
    items: Iterable[T],
    threads: int,
    *,
    first: Callable[[], None] = lambda: None,
    leave_after_s: float | None = None,
) -> None:
    """``do`` of each item, in so many threads; items are taken only as they are needed.

    The first error ends it, and is raised once all that was begun has ended.

    Args:
        do: What is called with each item.
        items: Each may hold much memory: it is let go of before the thread takes the next one.
        threads: How many calls run at once.
        first: What each thread calls before anything else.
        leave_after_s: Seconds after which Ctrl-C leaves behind what was begun and has not ended, for the process to
            end with. None: it waits for all.
    """
    waiting = iter(items)
    taking = threading.Lock()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            first()
            while not errors:
                with taking:
                    taken = list(islice(waiting, 1))
                if not taken:
                    return
                do(taken.pop())
        except BaseException as error:  # noqa: BLE001 - raised below, in the caller's thread
            errors.append(error)

    workers = [
        threading.Thread(target=work, name=f"gpuctl-worker-{number}", daemon=leave_after_s is not None)
        for number in range(threads)
    ]
    try:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    except BaseException as error:
        errors.append(error)
        if leave_after_s is None:
            raise
        deadline = time.monotonic() + leave_after_s
        for worker in workers:
            if worker.is_alive():  # Ctrl-C may come before all are started
                worker.join(max(0.0, deadline - time.monotonic()))
        raise
    if errors:
        raise errors[0]


def collect(
    call: Callable[[T], R], items: Iterable[T], threads: int, *, first: Callable[[], None] = lambda: None
) -> list[R]:
    """What ``call`` returns for each item, in their order: see ``for_each``."""
    results: dict[int, R] = {}

    def keep(numbered: tuple[int, T]) -> None:
        number, item = numbered
        results[number] = call(item)

    for_each(keep, enumerate(items), threads, first=first)
    return [results[number] for number in range(len(results))]


def read_each(items: Iterable[T], read: Callable[[T], R], use: Callable[[T, R], None]) -> None:
    """``use`` what ``read`` gives for every item, ``READS_AT_ONCE`` at a time (see ``for_each``).

    Ctrl-C does not wait for a bucket that does not answer: what was begun is left behind, and uses nothing any more.
    """
    over = threading.Event()

    def do(item: T) -> None:
        data = read(item)
        if not over.is_set():
            use(item, data)

    try:
        for_each(do, items, READS_AT_ONCE, leave_after_s=_PATIENCE_S)
    except BaseException:
        over.set()
        raise
