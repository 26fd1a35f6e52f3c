"""The part of a save that happens behind the training's back: upload, come together, commit.

One save after the other, in a thread that lives as long as there is one to do; so a process that ends with a save on
its way ends after it. An outage of the bucket only delays it. A fence, or a bucket that refuses what it is given, ends
the training with its next step: nobody wants to pay for steps that cannot be kept.

Old checkpoints are deleted in the same thread once the new one counts as done, and while no save waits: a machine that
is about to be taken has no time for that.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from functools import partial

import msgspec

from gpuctl.cluster import worker_context
from gpuctl.cluster.checkpoints.commit_log import BaseGone, CommitLog, folder_of
from gpuctl.cluster.checkpoints.manifest import Manifest, Part
from gpuctl.cluster.errors import CHECKPOINT_LOST, Fenced, GpuctlError
from gpuctl.cluster.records.checkpoints import CheckpointEntry
from gpuctl.cluster.worker_context import WorkerContext
from gpuctl.trainers.checkpoint.replicas import ReplicaWriter
from gpuctl.trainers.checkpoint.save.commit import collect_garbage, entry_of, timed
from gpuctl.trainers.checkpoint.save.pending_save import PendingSave, SaveOutcome
from gpuctl.trainers.checkpoint.save.report import RankReport, manifest_of, report_of
from gpuctl.trainers.checkpoint.save.store_gather import PeersGone, StoreGather
from gpuctl.trainers.checkpoint.save.uploader import UploadCancelled, Uploader, persist
from gpuctl.trainers.checkpoint.threads import give_way
from gpuctl.trainers.console import UnheardError, say
from gpuctl.trainers.world import World

_MOST_OWED = 3
"""Dropped checkpoints in the bucket beyond which a save waits until there are fewer: one that always waits for the one
before would else fill the bucket."""


class SaveThread:
    """Saves in the background, one rank's part. ``commits`` is rank 0's alone."""

    def __init__(
        self,
        round_number: int,
        mark: str,
        commits: CommitLog | None,
        uploader: Uploader,
        tiers: ReplicaWriter | None = None,
    ) -> None:
        self._round = round_number
        self._mark = mark
        self._commits = commits
        self._uploader = uploader
        self._replicas = tiers
        self._world = World.now()
        self._context = WorkerContext.from_env()
        self._gather = StoreGather(f"save/{mark}")  # a process may have several
        self._lock = threading.Lock()
        self._waiting: deque[PendingSave] = deque()
        self._thread: threading.Thread | None = None
        self._rests = threading.Event()
        self._rests.set()
        self._hurried = False
        self._attempts = 0
        self._unheard = UnheardError()
        self._known: dict[tuple[int, tuple[str, ...]], Part] = {}
        self._base: str | None = None
        self.ended_by: GpuctlError | None = None
        """Why no save will succeed any more: a fence, or a bucket that refuses. Uploads outlast an outage."""
        self.died_of: GpuctlError | None = None
        """An error that nobody has foreseen has ended the thread. There are no saves any more."""
        self.took_s: float | None = None
        """The last one that was committed, without what it stood behind others."""

    def based_on(self, entry: CheckpointEntry, manifest: Manifest) -> None:
        """``entry`` is in the log, so what has not changed since need not be written again."""
        self._known = {(part.size, part.blocks): part for part in manifest.parts}
        self._base = entry.path
        if self._replicas is not None:
            self._replicas.restored(entry.path)

    def in_flight(self) -> list[PendingSave]:
        with self._lock:
            return list(self._waiting)

    def submit(self, save: PendingSave) -> None:
        """Hand over a save. Raises ``died_of``."""
        self._unheard.tell()
        with self._lock:
            if self.died_of is not None:
                raise self.died_of
            if self._thread is None:
                thread = threading.Thread(target=self._work, name="gpuctl-save")
                thread.start()
                self._thread = thread
                self._rests.clear()
            save.submitted = time.monotonic()
            self._waiting.append(save)

    def heard(self) -> None:
        """The script is told what became of its saves, or asks, and needs no line about it."""
        self._unheard.drop()

    def rest(self) -> None:
        """Wait until nothing is left to do: all saves are done, and what they replaced is deleted."""
        self._rests.wait()

    def hurry(self) -> None:
        """Delete nothing any more: what time is left is for the last save. The next round deletes it."""
        self._hurried = True

    def _work(self) -> None:
        try:
            give_way()
            while (save := self._next()) is not None:
                self._finish(save)
                if save.entry is not None:
                    self._delete_unneeded()
        except BaseException as error:  # noqa: BLE001 - raised by whoever waits, or saves next
            self._die(error)

    def _next(self) -> PendingSave | None:
        with self._lock:
            if not self._waiting:
                self._thread = None
                self._rests.set()
                return None
            save = self._waiting[0]
            save.taken_up = time.monotonic()
            return save

    def _finish(self, save: PendingSave) -> None:
        try:
            self._settle(save)
        except GpuctlError as error:
            save.error = error
            if not isinstance(error, UploadCancelled | Fenced):
                error.exit_code = CHECKPOINT_LOST
            if not isinstance(error, UploadCancelled):
                self.ended_by = self.ended_by or error
        if save.error is None:
            self.took_s = save.spent_s()
        with self._lock:
            self._waiting.popleft()
        if not save.cancelled.is_set() and self._world.rank == 0:
            self._mark_lost(save.error)
            if save.error is not None:
                self._unheard.put(save.error)
        save.done.set()

    def _mark_lost(self, error: GpuctlError | None) -> None:
        """Tell the agent whether the newest checkpoint is kept: exit code 0 does not mean that it is."""
        if self._context is None:
            return
        path = self._context.round_dir / f"{worker_context.LOST}.{self._mark}"
        with contextlib.suppress(OSError):  # the agent has cleared the round away
            if error is None or isinstance(error, Fenced):
                path.unlink(missing_ok=True)
            else:
                path.write_text(str(error))

    def _die(self, error: BaseException) -> None:
        """Whoever waits for a save hears of it, and so does whoever makes another one."""
        with self._lock:
            self.died_of = GpuctlError(f"checkpoints are no longer saved: {error!r}")
            self.died_of.__cause__ = error
            self.ended_by = self.ended_by or self.died_of
            for save in self._waiting:
                save.error = self.died_of
            lost = [*self._waiting]
            self._waiting.clear()
            self._thread = None
            self._rests.set()
        if self._world.rank == 0:
            self._mark_lost(self.died_of)
        for save in lost:
            save.done.set()
        say(str(self.died_of))

    def _settle(self, save: PendingSave) -> None:
        """Until it is committed, or has failed on all ranks."""
        while True:
            number, self._attempts = self._attempts, self._attempts + 1
            report = self._upload(save, folder_of(save.step, self._round, self._mark, number))
            try:
                outcome = self._agree(save, number, report)
            except PeersGone as error:
                raise PeersGone(f"the checkpoint of step {save.step} was not written: {error.message}") from error
            if not outcome.again:
                break
            self._known, self._base = {}, None
        if outcome.fenced:
            raise Fenced(outcome.fenced, "a newer round has replaced this process; exiting")
        if outcome.cancelled:
            raise UploadCancelled(f"the checkpoint of step {save.step} was cancelled: {outcome.error}")
        if outcome.entry is None:
            raise GpuctlError(f"the checkpoint of step {save.step} was not written: {outcome.error}")
        save.entry = outcome.entry
        self._known = {(part.size, part.blocks): part for part in report.parts}
        self._base = outcome.entry.path
        if self._replicas is not None:
            self._replicas.committed(outcome.entry.path)

    def _upload(self, save: PendingSave, folder: str) -> RankReport:
        keys = [f"{folder}/{self._world.rank:05d}-{number:04d}" for number in range(len(save.layout.parts()))]
        views = [save.data[low:high] for low, high in save.layout.parts()]

        def count(size: int) -> None:
            save.uploaded += size

        def copy(part: Part, data: memoryview) -> tuple[str, ...]:
            return self._replicas.keep(folder, part, data) if self._replicas is not None else ()

        try:
            items = zip(keys, views, strict=True)
            parts = self._uploader.upload(items, self._known, save.cancelled, count, save.waiting.tell, copy)
        except UploadCancelled as error:
            return RankReport(step=save.step, error=str(error), cancelled=True)
        except GpuctlError as error:
            return RankReport(step=save.step, error=str(error))
        except Exception as error:  # noqa: BLE001 - the other ranks wait for a report
            return RankReport(step=save.step, error=repr(error))
        return report_of(save.step, save.share, save.layout, parts)

    def _agree(self, save: PendingSave, number: int, report: RankReport) -> SaveOutcome:
        told = self._gather.exchange(number, msgspec.json.encode(report))
        if told is None:
            return msgspec.json.decode(self._gather.outcome(number), type=SaveOutcome)
        outcome = self._commit(save, number, [msgspec.json.decode(text, type=RankReport) for text in told])
        self._gather.answer(number, msgspec.json.encode(outcome))
        return outcome

    def _commit(self, save: PendingSave, number: int, reports: list[RankReport]) -> SaveOutcome:
        """Commit, on rank 0."""
        commits = self._commits
        assert commits is not None, "only rank 0 commits"
        for rank, report in enumerate(reports):
            if report.error or report.step != save.step:
                what = report.error or f"it saves step {report.step}"
                what = what if len(reports) == 1 else f"rank {rank}: {what}"
                return SaveOutcome(error=what, cancelled=any(report.cancelled for report in reports))
        try:
            manifest = manifest_of(reports)
            path = folder_of(save.step, self._round, self._mark, number)
            entry = entry_of(
                manifest,
                path,
                step=save.step,
                round_number=self._round,
                world=self._world.size,
                metrics=save.metrics,
                reason=save.reason,
            )
            base = self._base if entry.written < entry.bytes else None
            commit = partial(commits.commit, manifest=manifest, base=base)
            stamped = partial(timed, entry, save.begun, save.deadline)
            return SaveOutcome(entry=persist(lambda: commit(stamped()), save.cancelled, save.waiting.tell))
        except BaseGone as error:
            say(f"{error.message}: writing the checkpoint of step {save.step} in full")
            return SaveOutcome(again=True)
        except Fenced as error:
            return SaveOutcome(fenced=error.message)
        except UploadCancelled as error:
            return SaveOutcome(error=str(error), cancelled=True)
        except GpuctlError as error:
            return SaveOutcome(error=str(error))
        except Exception as error:  # noqa: BLE001 - the other ranks wait for an outcome
            return SaveOutcome(error=repr(error))

    def _delete_unneeded(self) -> None:
        if (commits := self._commits) is not None:
            collect_garbage(lambda: commits.delete_unneeded(self._may_delete))

    def _may_delete(self) -> bool:
        assert self._commits is not None, "only rank 0 deletes"
        if self._hurried:
            return False
        return not self.in_flight() or self._commits.pending_deletions > _MOST_OWED
