"""``Checkpointer``: whole-or-absent checkpoints for any PyTorch loop, at the price of a copy to host memory.

::

    checkpointer = Checkpointer(every=100)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    for step in range(checkpointer.restore(state) or 0, steps):
        ...  # one optimizer step
        checkpointer.step(step + 1, state)
    checkpointer.wait()

A save copies this rank's share to host memory and returns; all ranks upload in parallel while the training goes on, and
then one entry in a ledger commits it. So a checkpoint is there whole or not at all, and a process of an older round
cannot commit any more (see ``save_thread`` and ``commit_log``). Where the position in the data depends on more
than the step, put it into the state as well.
"""

from __future__ import annotations

import contextlib
import operator
import secrets
import threading
import time
from collections.abc import Mapping
from typing import Any, Literal

import torch

from gpuctl.cluster.agreement import ledgers
from gpuctl.cluster.checkpoints.commit_log import CommitLog
from gpuctl.cluster.checkpoints.manifest import Manifest
from gpuctl.cluster.checkpoints.retention import Retention
from gpuctl.cluster.errors import BadInput, Damaged, Fenced, GpuctlError
from gpuctl.cluster.records.checkpoints import CheckpointEntry, SaveReason
from gpuctl.cluster.storage.bucket import open_bucket
from gpuctl.cluster.storage.interface import PartStore
from gpuctl.cluster.worker_context import WorkerContext
from gpuctl.trainers.checkpoint.load.restore import restore
from gpuctl.trainers.checkpoint.load.sources import BucketSource, Parts
from gpuctl.trainers.checkpoint.location import folder_at, own_folder
from gpuctl.trainers.checkpoint.ranks import Ranks
from gpuctl.trainers.checkpoint.replicas import ReplicaWriter
from gpuctl.trainers.checkpoint.round_saves import RoundSaves
from gpuctl.trainers.checkpoint.save.host_buffer import HostBuffers, layout_of
from gpuctl.trainers.checkpoint.save.partition import partition_of
from gpuctl.trainers.checkpoint.save.save_thread import SaveThread
from gpuctl.trainers.checkpoint.save.schedule import FailureHistory, SaveSchedule
from gpuctl.trainers.checkpoint.save.uploader import TransferLimits, Uploader
from gpuctl.trainers.checkpoint.state.state_tensors import State, contents_of
from gpuctl.trainers.console import say
from gpuctl.trainers.metrics.stream import metrics as own_metrics
from gpuctl.trainers.stop_signal import StopSignal
from gpuctl.trainers.world import World


class Checkpointer:
    """Keeps checkpoints of a training run, one ``every`` so many optimizer steps; ``"auto"`` finds out how many are
    best, and says why (see ``schedule``).

    ``url`` is a bucket URL or a local path. By default it is the job's own folder in the cluster's bucket; outside of a
    gpuctl job there is none, and then checkpoints are off: ``restore`` finds nothing and ``save`` does nothing.
    ``store`` takes the place of ``url`` where a program has its own.

    ``keep`` is how many stay (``None``: all), or a ``Retention``. If one is still being uploaded when the next is due,
    that one is skipped or waits for a second host buffer, as ``when_busy`` says; ``skipped`` counts. ``limits`` bounds
    what uploads and restores take of the machine.

    The *state* given to ``restore`` and ``save`` is a dict of models, optimizers, schedulers and other objects with
    ``state_dict`` and ``load_state_dict``, and of plain values. The random number generators of each rank (Python's,
    NumPy's, torch's) are kept besides. A checkpoint of four ranks restores on three, or on one, whether they hold whole
    parameters (DDP) or shards (FSDP2).

    In a world of several ranks the process group must exist before the first call, and every rank makes the same calls.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        every: int | Literal["auto"] | None = None,
        keep: int | Retention | None = 3,
        when_busy: Literal["skip", "wait"] = "skip",
        limits: TransferLimits | None = None,
        store: PartStore | None = None,
    ) -> None:
        if not (every is None or every == "auto" or (isinstance(every, int) and every >= 1)):
            raise BadInput(f"every={every!r} is not a number of steps", "use 1 or more, or 'auto'")
        if when_busy not in ("skip", "wait"):
            raise BadInput(f"when_busy={when_busy!r} is not a policy", "use 'skip' or 'wait'")
        self._context = WorkerContext.from_env()
        self._own = url is None and store is None
        self._probes = url is not None and store is None
        self._failures = FailureHistory()
        self._schedule = SaveSchedule(every, lambda: self._failures)
        self._retention = keep if isinstance(keep, Retention) else Retention(last=keep)
        self._when_busy = when_busy
        self._limits = limits or TransferLimits()
        self._store = store or _open(url, self._context)
        self._ranks = Ranks()
        self._commits: CommitLog | None = None
        self._saves: RoundSaves | None = None
        self._replicas: ReplicaWriter | None = None
        self._buffers = HostBuffers()
        self._prepared = False
        self._notice = StopSignal()
        if self.on:
            self._notice.listen()

    @property
    def on(self) -> bool:
        """Whether there is a place for checkpoints."""
        return self._store is not None

    @property
    def skipped(self) -> int:
        """Saves that were due while another one was on its way."""
        return 0 if self._saves is None else self._saves.skipped

    def restore(self, state: State) -> int | None:
        """Load the newest checkpoint that is whole into ``state`` (objects in place, plain values by assignment) and
        return its step; ``None`` if there is none.

        A damaged checkpoint is passed over for the one before, with a line on stderr. What a checkpoint has beyond
        ``state`` is left alone, but a strategy where ``state`` has an optimizer: the run that goes on is another one.

        Raises ``BadInput`` for a checkpoint of another model or with another strategy before anything is loaded, and
        ``Damaged`` if there are checkpoints but none is whole.
        """
        if self._store is None:
            return None
        if self._saves is not None:
            self._saves.rest()
        saves, entries = self._begin(self._store)
        for entry in reversed(entries):
            try:
                manifest = self._load(self._store, entry, state)
            except Damaged as damaged:
                if World.now().rank == 0:
                    say(f"checkpoint of step {entry.step} is damaged: {damaged}")
                continue
            saves.restored(entry, manifest)
            return entry.step
        if entries:
            raise Damaged(
                f"none of the {len(entries)} checkpoints is intact", "delete them (gpuctl ckpt rm) to start over"
            )
        self._schedule.begin(0)
        return None

    def step(self, step: int, state: State, metrics: Mapping[str, float] | None = None) -> None:
        """Call it after each optimizer step, with the number of steps done: saves when one is due; and when this
        machine is about to be taken, saves at a step that all ranks agree on, and ends the process with code 0.

        ``metrics`` are kept with the checkpoint, for ``Retention.best``: numbers, or tensors and arrays of one. Raises
        what ``should_stop`` and ``save`` do.
        """
        if self.should_stop(step):
            self._save(step, state, "notice", metrics)
            self.leave()
        if not self._prepared and self.on and self._schedule.on:
            self._prepare(state)
        if self._schedule.is_due(step):
            self._save(step, state, "interval", metrics)

    def save(self, step: int, state: State, metrics: Mapping[str, float] | None = None) -> None:
        """Save ``state`` after ``step`` optimizer steps: returns when it is copied to host memory, and nothing that
        happens to ``state`` from then on is in the checkpoint. It is committed some time later (``wait``).

        A step that this round has already saved or restored is not written again. Raises ``BadInput`` for a state that
        cannot be kept, or a metric that is no number, and ``Fenced`` if a newer round has begun.
        """
        self._save(step, state, "asked", metrics)

    def wait(self, timeout_s: float | None = None) -> None:
        """Until what was saved is committed and, without a ``timeout_s``, what it replaced is deleted. A process also
        waits for that when it ends; but only here the script hears of it. Otherwise a line tells of what has failed.

        Raises ``Fenced`` or another ``GpuctlError`` if the newest save failed, ``TimeoutError``.
        """
        if self._saves is not None:
            self._saves.wait(timeout_s)

    def should_stop(self, step: int) -> bool:
        """Whether to save now (``step`` steps are done) and ``leave``, because this process was asked to stop: ``True``
        at the same step on every rank. Call it once between any two optimizer steps; undisturbed it costs a few
        microseconds, for ``gpuctl status`` to show the step.

        The steps must be in lock step, as with DDP: no rank finishes a step that another has not begun. Raises
        ``Fenced`` if a newer round has begun, and ``GpuctlError`` if the bucket has refused a checkpoint.
        """
        if self._saves is not None:
            self._saves.raise_if_ended()
        own_metrics().stepped(step)
        return self._notice.should_stop(step)

    def leave(self) -> None:
        """End this process with exit code 0, once what was saved is committed on all ranks. Raises ``SystemExit``."""
        deadline = self._hurry()
        try:
            self.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        except (GpuctlError, TimeoutError) as error:
            if isinstance(error, Fenced):
                raise
            say(f"leaving without a last checkpoint: {error}")
        self._ranks.barrier()
        self._notice.drained()
        raise SystemExit(0)

    def _save(self, step: int, state: State, reason: SaveReason, metrics: Mapping[str, float] | None) -> None:
        if self._store is None:
            return
        step, numbers = _count(step), _numbers(metrics or {})
        own_metrics().stepped(step)
        saves = self._saves or self._begin(self._store)[0]
        if reason == "notice":
            saves.save_in_time(step, state, numbers, self._hurry())
        else:
            saves.save(step, state, reason, numbers)

    def _hurry(self) -> float | None:
        """The deadline. Where there is one, no time is left for deleting old checkpoints."""
        deadline = self._notice.deadline()
        if deadline is not None and self._saves is not None:
            self._saves.hurry()
        return deadline

    def _prepare(self, state: State) -> None:
        """Have a host buffer ready, so that the first save costs no more than the others."""
        self._prepared = True
        world = World.now()
        contents = contents_of(state, world.rank)
        partition = partition_of(contents, world.rank, world.size)
        self._buffers.prepare(layout_of(partition, contents.values).size)

    def _begin(self, store: PartStore) -> tuple[RoundSaves, tuple[CheckpointEntry, ...]]:
        """Raise the fence, and agree on this round's number and on what there is to restore."""
        world = self._ranks.join()
        if self._commits is None and world.rank == 0:
            number = self._context.round if self._own and self._context is not None else None
            self._commits = CommitLog(store, number, self._retention, probes=self._probes)
            if self._schedule.is_auto and self._context is not None:
                threading.Thread(target=self._read_failures, args=(self._context,), daemon=True).start()
        commits = self._commits
        number, entries, mark = self._ranks.on_rank0(
            None if commits is None else lambda: (*commits.begin(), secrets.token_hex(2))
        )
        if self._saves is None:
            if self._own and self._context is not None:
                self._replicas = ReplicaWriter.of(self._context, say)
            thread = SaveThread(number, mark, self._commits, Uploader(store, self._limits), self._replicas)
            self._saves = RoundSaves(thread, self._ranks, self._buffers, self._schedule, self._when_busy)
        return self._saves, entries

    def _load(self, store: PartStore, entry: CheckpointEntry, state: State) -> Manifest:
        parts = Parts([*(self._replicas.sources(entry) if self._replicas else []), BucketSource(store)])
        manifest = restore(store, entry, state, parts, self._ranks, self._limits)
        if self._replicas is not None:
            say(f"step {entry.step} is restored: {parts.describe()}")
        return manifest

    def _read_failures(self, context: WorkerContext) -> None:
        """Read this job's failures so far. Another one would be another round's."""
        with contextlib.suppress(GpuctlError):
            history = ledgers.rounds(open_bucket(context.bucket), context.job).history()
            self._failures = FailureHistory.of((version.value for version in history if version.value), time.time())


def _count(step: int) -> int:
    """A count as Python's ``int``: NumPy's, say, is not JSON."""
    try:
        return operator.index(step)
    except TypeError as error:
        raise BadInput(f"step={step!r} is not a number of optimizer steps", "use an int") from error


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    found = {}
    for name, value in metrics.items():
        try:
            found[name] = float(value.detach() if isinstance(value, torch.Tensor) else value)
        except (TypeError, ValueError) as error:
            raise BadInput(f"metrics[{name!r}] is not a number but {value!r}", "give a float") from error
    return found


def _open(url: str | None, context: WorkerContext | None) -> PartStore | None:
    """The folder of the checkpoints: the job's own by default."""
    if url is not None:
        return folder_at(url)
    return None if context is None else own_folder(context)
