"""Puts the parts of one rank's share into the bucket, a few at a time, behind the training's back.

A part whose bytes are those of a part of the last committed checkpoint is not written again but referred to. What the
bucket cannot take now it may take later: as long as nobody calls it off, an upload outlasts an outage.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from gpuctl.cluster.checkpoints.manifest import Part, blocks_of, digest
from gpuctl.cluster.concurrency import collect
from gpuctl.cluster.errors import BadInput, GpuctlError, StoreUnavailable
from gpuctl.cluster.retry import PAUSES_S
from gpuctl.cluster.storage.interface import PartStore
from gpuctl.trainers.checkpoint.threads import give_way

T = TypeVar("T")

THREADS = max(4, min(8, 2 * (os.cpu_count() or 1)))
"""Uploads at once. Each keeps a part of a core busy: on two cores, eight take a quarter longer than four."""
_READS = 8
AFTER_END_S = 300.0
"""How long a process that has nothing else to do waits for a bucket that is away."""

Known = Mapping[tuple[int, tuple[str, ...]], Part]
"""Parts that are in the bucket, by size and digests."""


class UploadCancelled(GpuctlError):
    """An upload was cancelled because nobody waits for it any more."""


@dataclass(frozen=True, slots=True)
class TransferLimits:
    """Limits on what checkpoints may use of a machine, for each rank."""

    upload_bytes_per_s: float | None = None
    memory_bytes: int = 256 << 20
    """Besides the copy of the state: what reads in flight may hold."""

    def __post_init__(self) -> None:
        if self.upload_bytes_per_s is not None and self.upload_bytes_per_s <= 0:
            raise BadInput(f"upload_bytes_per_s={self.upload_bytes_per_s} is not a rate", "use more than 0")
        if self.memory_bytes < 64 << 20:
            raise BadInput(f"memory_bytes={self.memory_bytes} is too small to read parts", "use 64 MiB or more")

    def reads(self, part_bytes: int) -> int:
        """How many parts may be read at once: a client holds one twice while it puts it together."""
        return max(1, min(_READS, self.memory_bytes // (2 * max(1, part_bytes))))


class RateLimiter:
    """Limits transfers to so many bytes per second, over all threads."""

    def __init__(self, bytes_per_s: float | None, now: Callable[[], float] = time.monotonic) -> None:
        self._bytes_per_s = bytes_per_s
        self._now = now
        self._lock = threading.Lock()
        self._free_at = now()

    def delay_s(self, size: int) -> float:
        """Books ``size`` bytes; how long to wait before sending them."""
        if self._bytes_per_s is None:
            return 0.0
        with self._lock:
            start = max(self._free_at, self._now())
            self._free_at = start + size / self._bytes_per_s
            return start - self._now()

    def give_back(self, size: int) -> None:
        """What was booked is not sent."""
        if self._bytes_per_s is not None:
            with self._lock:
                self._free_at -= size / self._bytes_per_s


class Uploader:
    """Uploads one rank's parts."""

    def __init__(self, store: PartStore, limits: TransferLimits) -> None:
        self._store = store
        self._limiter = RateLimiter(limits.upload_bytes_per_s)

    def upload(
        self,
        keys_and_data: Iterable[tuple[str, memoryview]],
        known: Known,
        cancelled: threading.Event,
        on_bytes: Callable[[int], None] = lambda _: None,
        on_trouble: Callable[[GpuctlError], None] = lambda _: None,
        copy: Callable[[Part, memoryview], tuple[str, ...]] = lambda _part, _data: (),
    ) -> list[Part]:
        """The parts, in the order given, once they are all in the bucket. ``on_bytes`` hears of each that is; ``copy``
        gets each for a nearer tier, and returns the nodes that have it.

        Raises ``StoreError`` if the store refuses one, ``UploadCancelled``.
        """

        def put(item: tuple[str, memoryview]) -> Part:
            key, data = item
            part = Part(key, len(data), tuple(digest(data[low:high]) for low, high in blocks_of(len(data))))
            there = known.get((part.size, part.blocks))
            if there is not None:
                part = Part(there.key, there.size, there.blocks)
            else:
                if cancelled.wait(self._limiter.delay_s(part.size)):
                    self._limiter.give_back(part.size)
                    raise UploadCancelled(f"the upload of {key} was cancelled")
                persist(lambda: self._store.put(key, data), cancelled, on_trouble)
            nodes = copy(part, data)
            on_bytes(part.size)
            return msgspec.structs.replace(part, nodes=nodes)

        return collect(put, keys_and_data, THREADS, first=give_way)


def persist(
    call: Callable[[], T], cancelled: threading.Event, on_trouble: Callable[[GpuctlError], None] = lambda _: None
) -> T:
    """What ``call`` returns, however long the bucket is away. ``on_trouble`` hears of each refusal.

    Raises ``UploadCancelled`` instead if nobody waits for it: it is called off, or the script has ended a while ago.
    """
    ended_at: float | None = None
    for pause_s in itertools.chain(PAUSES_S, itertools.repeat(PAUSES_S[-1])):
        try:
            return call()
        except StoreUnavailable as error:
            on_trouble(error)
            if ended_at is None and not threading.main_thread().is_alive():
                ended_at = time.monotonic()
            late = ended_at is not None and time.monotonic() - ended_at > AFTER_END_S
            if late or cancelled.wait(pause_s):
                raise UploadCancelled(error.message, error.hint) from error
    raise AssertionError("not reached")
