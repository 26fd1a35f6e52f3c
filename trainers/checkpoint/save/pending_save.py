"""A save on its way: what was copied of this rank's state, and what became of it."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass, field

import msgspec

from gpuctl.cluster.errors import GpuctlError
from gpuctl.cluster.records.checkpoints import CheckpointEntry, SaveReason
from gpuctl.trainers.checkpoint.save.commit import Waiting
from gpuctl.trainers.checkpoint.save.host_buffer import BufferLayout, HostBuffer
from gpuctl.trainers.checkpoint.save.partition import RankPartition


@dataclass(slots=True)
class PendingSave:
    """One save of this rank: what was copied, and what became of it."""

    step: int
    reason: SaveReason
    share: RankPartition
    layout: BufferLayout
    data: memoryview
    buffer: HostBuffer
    metrics: dict[str, float]
    deadline: float | None = None
    """On the monotonic clock: when this machine is taken."""
    begun: float = field(default_factory=time.monotonic)
    submitted: float = field(default_factory=time.monotonic)
    taken_up: float | None = None
    """When the saves before it were done."""
    done: threading.Event = field(default_factory=threading.Event)
    cancelled: threading.Event = field(default_factory=threading.Event)
    uploaded: int = 0
    error: GpuctlError | None = None
    entry: CheckpointEntry | None = None
    waiting: Waiting = field(init=False)

    def __post_init__(self) -> None:
        self.waiting = Waiting(self.step)

    def remaining_s(self, usual_s: float | None) -> float:
        """Estimate of what this save still takes once those before it are done, if one takes ``usual_s``."""
        elapsed_s = self.spent_s()
        told = 10 * self.uploaded >= self.layout.size  # the first parts to arrive are the small ones
        by_bytes_s = elapsed_s * (self.layout.size / self.uploaded - 1) if told else float("inf")
        return by_bytes_s if usual_s is None else max(usual_s - elapsed_s, by_bytes_s if told else 0.0)

    def in_all_s(self) -> float | None:
        """Estimate of what it takes from its begin to its commit; ``None`` if it has not come far enough to tell."""
        in_all_s = self.spent_s() + self.remaining_s(None)
        return in_all_s if math.isfinite(in_all_s) else None

    def spent_s(self) -> float:
        """So far, for the copy and the upload. That it stood behind another one does not count."""
        uploading_s = 0.0 if self.taken_up is None else time.monotonic() - self.taken_up
        return self.submitted - self.begun + uploading_s


class SaveOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a save, which rank 0 sends to all."""

    entry: CheckpointEntry | None = None
    """If it is committed."""
    again: bool = False
    """The checkpoint that it referred to is gone: write all of it."""
    fenced: str = ""
    cancelled: bool = False
    error: str = ""
