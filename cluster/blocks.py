"""The blocks of parts (see ``manifest``), read from the bucket and checked, several at a time, in bounded memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from itertools import islice
from typing import TypeVar

from gpuctl.cluster.bucket import Bucket
from gpuctl.cluster.errors import Damaged
from gpuctl.cluster.manifest import BLOCK_BYTES, Part, digest

T = TypeVar("T")
R = TypeVar("R")

AT_ONCE = 6
"""Blocks in memory: 6 MiB, of which the allocator makes about twice that."""
_PATIENCE_S = 2.0


def read_block(store: Bucket, part: Part, number: int) -> memoryview:
    """Raises ``Damaged`` if it is missing or is not what was written."""
    begin, end = bounds(part, number)
    try:
        data = store.get_range(part.key, begin, end)
    except FileNotFoundError as error:
        raise Damaged(f"{part.key} is missing") from error
    if digest(data) != part.blocks[number]:
        raise Damaged(f"{part.key} is not what was written: bytes {begin} to {end} differ")
    return data


def bounds(part: Part, number: int) -> tuple[int, int]:
    """Where block ``number`` begins and ends."""
    begin = number * BLOCK_BYTES
    return begin, min(part.size, begin + BLOCK_BYTES)


def each(items: Iterable[T], read: Callable[[T], R], use: Callable[[T, R], None]) -> None:
    """``use`` what ``read`` gives for every item, ``AT_ONCE`` at a time; items are taken only as they are needed.

    The first error ends it, and is raised once all that was begun has ended. Ctrl-C does not wait for a bucket that
    does not answer: what was begun is left behind, for the process to end with, and uses nothing any more.
    """
    waiting = iter(items)
    taking = threading.Lock()
    over = threading.Event()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            while not over.is_set():
                with taking:
                    taken = list(islice(waiting, 1))
                if not taken:
                    return
                data = read(taken[0])
                if not over.is_set():
                    use(taken[0], data)
                del data  # not while the next one comes
        except BaseException as error:  # noqa: BLE001 - raised below, in the caller's thread
            errors.append(error)
            over.set()

    threads = [threading.Thread(target=work, name="gpuctl-blocks", daemon=True) for _ in range(AT_ONCE)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except BaseException:
        over.set()
        deadline = time.monotonic() + _PATIENCE_S
        for thread in threads:
            if thread.is_alive():  # Ctrl-C may come before all are started
                thread.join(max(0.0, deadline - time.monotonic()))
        raise
    if errors:
        raise errors[0]
