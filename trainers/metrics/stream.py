"""The stream of metrics: what ``gpuctl status`` shows, what ``gpuctl jobs`` keeps, and TensorBoard's event files.

In a gpuctl job, ``log_metrics`` appends to the files that the node's agent ships (see ``cluster.worker_context``).
Outside of one it does nothing, unless ``GPUCTL_METRICS_FILE`` names a file for the records. Nothing here imports torch,
and nothing is asked of the other ranks: global rank 0 writes the records, and each node's local rank 0 how far the node
is.
"""

from __future__ import annotations

import atexit
import json
import math
import mmap
import os
import sys
import time
from pathlib import Path
from typing import SupportsFloat

from gpuctl.cluster import worker_context
from gpuctl.cluster.worker_context import WorkerContext
from gpuctl.trainers.metrics.append_file import AppendFile
from gpuctl.trainers.metrics.tensorboard_events import EventFile

_PROGRESS_BYTES = 160
"""The progress line is overwritten in place, so it always has the same length: a reader never meets the rest of an
older, longer one."""
_RATE_S = 1.0
"""Least time over which steps per second are measured, and between two records of a loop that logs nothing."""


def log_metrics(step: int, **values: SupportsFloat) -> None:
    """Record ``values`` (numbers or one-element tensors) for optimizer step ``step``.

    Call it on every rank or on rank 0 alone; global rank 0's values are the ones kept. ``loss`` and ``steps_per_s`` are
    the names that ``gpuctl status`` shows.
    """
    metrics().log(step, values)


class Metrics:
    """The open files of one process. ``progress`` costs a write to memory, ``log`` one ``write``, and an event."""

    def __init__(
        self, records: Path | None, progress: Path | None, tensorboard: Path | None, round_number: int = 0
    ) -> None:
        self._round = round_number
        self._records: AppendFile | None = None
        self._progress: mmap.mmap | None = None
        try:
            self._records = AppendFile(records) if records else None
            self._progress = _mapped(progress, _PROGRESS_BYTES) if progress else None
        except OSError as error:  # a full disk: a training that saves its checkpoints elsewhere goes on
            print(f"gpuctl: steps and metrics are not recorded: {error}", file=sys.stderr)
        self._events = EventFile(tensorboard) if tensorboard else None
        self._shown: dict[str, float | None] = {"loss": None, "steps_per_s": None}
        self._said = json.dumps(self._shown)[1:-1]
        self._step: int | None = None
        self._logged: int | None = None
        """Of the last call of ``log``."""
        self._recorded: int | None = None
        self._recorded_at = 0.0
        self._measured: tuple[int, float] | None = None
        """Step and time at which the rate was measured last; ``None`` also where the script tells of its own."""
        self._tells_rate = False
        self.steps: int | None = None
        """Of the whole training, for people."""

    @classmethod
    def from_env(cls) -> Metrics:
        rank, local_rank = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
        context = WorkerContext.from_env()
        if context is None:
            file = os.environ.get("GPUCTL_METRICS_FILE")
            return cls(Path(file) if file and rank == 0 else None, None, None)
        return cls(
            context.round_dir / worker_context.METRICS if rank == 0 else None,
            context.round_dir / worker_context.PROGRESS if local_rank == 0 else None,
            context.tensorboard_dir if rank == 0 else None,
            context.round,
        )

    def log(self, step: int, values: dict[str, SupportsFloat]) -> None:
        values = {name: _detached(value) for name, value in values.items()}
        numbers = {name: _finite(value) for name, value in values.items()}
        self._shown.update((name, numbers[name]) for name in self._shown if name in numbers)
        self._said = json.dumps(self._shown)[1:-1]
        self._tells_rate = self._tells_rate or "steps_per_s" in numbers
        self._logged = step
        self.progress(step)
        now = time.time()
        self._record(step, now, numbers)
        if self._events is not None:
            self._events.scalars(step, now, {name: float(value) for name, value in values.items()})

    def progress(self, step: int) -> None:
        """Note that optimizer step ``step`` is done, with the loss and the rate that were logged last. Without a rate,
        the one that follows from the steps."""
        if self._progress is not None:
            now = time.time()
            if not self._tells_rate:
                self._measure(step, now)
            self._step = step
            of = f', "steps": {self.steps}' if self.steps is not None else ""
            line = f'{{"step": {int(step)}{of}, {self._said}, "at": {now:.3f}}}'
            self._progress[:] = line.ljust(_PROGRESS_BYTES - 1).encode() + b"\n"

    def stepped(self, step: int) -> None:
        """The same, from who knows the step and nothing else. A loop that tells of its steps by itself is left to it;
        for one that logs nothing, there is a record now and then."""
        if self._progress is None or step == self._step:
            return
        if self._logged is not None and step <= self._logged + 1:  # some count from 0
            return
        self.progress(step)
        if self._logged is None and self._records is not None:
            if self._recorded is None:
                atexit.register(self._record_last)
            if time.time() - self._recorded_at >= _RATE_S:
                self._record_bare(step)

    def _measure(self, step: int, now: float) -> None:
        if self._measured is None or step < self._measured[0]:
            self._measured = (step, now)
        elif now - self._measured[1] >= _RATE_S:
            rate = (step - self._measured[0]) / (now - self._measured[1])
            self._measured = (step, now)
            self._shown["steps_per_s"] = float(f"{rate:.4g}")
            self._said = json.dumps(self._shown)[1:-1]

    def _record_bare(self, step: int) -> None:
        now = time.time()
        self._record(step, now, {"steps_per_s": rate} if (rate := self._shown["steps_per_s"]) else {})
        self._recorded, self._recorded_at = step, now

    def _record_last(self) -> None:
        if self._logged is None and self._step is not None and self._step != self._recorded:
            self._record_bare(self._step)

    def _record(self, step: int, now: float, numbers: dict[str, float | None]) -> None:
        if self._records is not None:
            record = {"step": step, "at": round(now, 3), "round": self._round, **numbers}
            self._records.append(json.dumps(record).encode() + b"\n")


_of_this_process: tuple[int, Metrics] | None = None


def metrics() -> Metrics:
    """This process's ``Metrics``, opened on first use. A fork (the warm interpreter's) opens its own."""
    global _of_this_process
    if _of_this_process is None or _of_this_process[0] != os.getpid():
        _of_this_process = (os.getpid(), Metrics.from_env())
    return _of_this_process[1]


def _mapped(path: Path, size: int) -> mmap.mmap:
    """A file to write to as memory, which is done at every step: 5 us where a ``pwrite`` takes 14. The kernel keeps it
    just the same when this process is killed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        if hasattr(os, "posix_fallocate"):  # memory of a file without room on the disk ends its process, by SIGBUS
            os.posix_fallocate(file, 0, size)
        else:
            os.ftruncate(file, size)
        return mmap.mmap(file, size)
    finally:
        os.close(file)


def _finite(value: SupportsFloat) -> float | None:
    """JSON has no NaN and no infinity: a loss that diverged is shown as none."""
    number = float(value)
    return number if math.isfinite(number) else None


def _detached(value: SupportsFloat) -> SupportsFloat:
    """A loss tensor still has its graph, and torch warns when that is turned into a number."""
    detached: SupportsFloat = value.detach() if hasattr(value, "detach") else value
    return detached
