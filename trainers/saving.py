"""The part of a save that happens behind the training's back: upload, come together, commit.

One save after the other, in a thread that lives as long as there is one to do; so a process that ends with a save on
its way ends after it. An outage of the bucket only delays it. A fence, or a bucket that refuses what it is given, ends
the training with its next step: nobody wants to pay for steps that cannot be kept.

Old checkpoints are deleted in the same thread once the new one counts as done, and while no save waits: a machine that
is about to be taken has no time for that.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from gpuctl.cluster.commits import BaseGone, Commits, folder_of
from gpuctl.cluster.errors import Damaged, Fenced, GpuctlError, StoreError, StoreUnavailable
from gpuctl.cluster.manifest import Manifest, Part
from gpuctl.cluster.records import CheckpointEntry
from gpuctl.trainers.gathering import Gathering, Scattered
from gpuctl.trainers.reports import Report, manifest_of, report_of
from gpuctl.trainers.shares import Share
from gpuctl.trainers.staging import Laid, Staging
from gpuctl.trainers.threads import give_way
from gpuctl.trainers.tiers import Tiers
from gpuctl.trainers.uploading import CalledOff, Uploader, persist
from gpuctl.trainers.world import World

Reason = Literal["asked", "interval", "notice"]

_LOOK_S = 0.1
"""How soon after the script's end a save that it never asked about is told of."""
_MOST_OWED = 3
"""Dropped checkpoints in the bucket beyond which a save waits until there are fewer: one that always waits for the one
before would else fill the bucket."""


@dataclass(slots=True)
class Save:
    """One save of this rank: what was copied, and what became of it."""

    step: int
    reason: Reason
    share: Share
    laid: Laid
    data: memoryview
    staging: Staging
    metrics: dict[str, float]
    deadline: float | None = None
    """On the monotonic clock: when this machine is taken."""
    begun: float = field(default_factory=time.monotonic)
    submitted: float = field(default_factory=time.monotonic)
    taken_up: float | None = None
    """When the saves before it were done."""
    done: threading.Event = field(default_factory=threading.Event)
    called_off: threading.Event = field(default_factory=threading.Event)
    uploaded: int = 0
    error: GpuctlError | None = None
    entry: CheckpointEntry | None = None
    told: bool = False

    def remaining_s(self, usual_s: float | None) -> float:
        """Estimate of what this save still takes once those before it are done, if one takes ``usual_s``."""
        elapsed_s = self.spent_s()
        told = 10 * self.uploaded >= self.laid.size  # the first parts to arrive are the small ones
        by_bytes_s = elapsed_s * (self.laid.size / self.uploaded - 1) if told else float("inf")
        return by_bytes_s if usual_s is None else max(usual_s - elapsed_s, by_bytes_s if told else 0.0)

    def in_all_s(self) -> float | None:
        """Estimate of what it takes from its begin to its commit; ``None`` if it has not come far enough to tell."""
        in_all_s = self.spent_s() + self.remaining_s(None)
        return in_all_s if math.isfinite(in_all_s) else None

    def spent_s(self) -> float:
        """So far, for the copy and the upload. That it stood behind another one does not count."""
        uploading_s = 0.0 if self.taken_up is None else time.monotonic() - self.taken_up
        return self.submitted - self.begun + uploading_s

    def tell(self, error: GpuctlError) -> None:
        """That the bucket is away is worth one line."""
        if not self.told:
            self.told = True
            say(f"the checkpoint of step {self.step} has to wait: {error}")


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Rank 0's answer to all."""

    entry: CheckpointEntry | None = None
    """If it is committed."""
    again: bool = False
    """The checkpoint that it referred to is gone: write all of it."""
    fenced: str = ""
    called_off: bool = False
    error: str = ""


class Saver:
    """Of one rank. ``commits`` is rank 0's alone."""

    def __init__(
        self, round_number: int, mark: str, commits: Commits | None, uploader: Uploader, tiers: Tiers | None = None
    ) -> None:
        self._round = round_number
        self._mark = mark
        self._commits = commits
        self._uploader = uploader
        self._tiers = tiers
        self._world = World.now()
        self._gathering = Gathering(f"save/{mark}")  # a process may have several
        self._lock = threading.Lock()
        self._waiting: deque[Save] = deque()
        self._thread: threading.Thread | None = None
        self._rests = threading.Event()
        self._rests.set()
        self._hurried = False
        self._attempts = 0
        self._unheard: GpuctlError | None = None
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
        if self._tiers is not None:
            self._tiers.restored(entry.path)

    def in_flight(self) -> list[Save]:
        with self._lock:
            return list(self._waiting)

    def submit(self, save: Save) -> None:
        """Raises ``died_of``."""
        self._tell_unheard()
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
        self._unheard = None

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
                    self._tidy()
        except BaseException as error:  # noqa: BLE001 - raised by whoever waits, or saves next
            self._die(error)

    def _next(self) -> Save | None:
        with self._lock:
            if not self._waiting:
                self._thread = None
                self._rests.set()
                return None
            save = self._waiting[0]
            save.taken_up = time.monotonic()
            return save

    def _finish(self, save: Save) -> None:
        try:
            self._settle(save)
        except GpuctlError as error:
            save.error = error
            if not isinstance(error, CalledOff):
                self.ended_by = self.ended_by or error
        if save.error is None:
            self.took_s = save.spent_s()
        with self._lock:
            self._waiting.popleft()
        if save.error is not None and not save.called_off.is_set() and self._world.rank == 0:
            self._note(save.error)
        save.done.set()

    def _note(self, error: GpuctlError) -> None:
        """Whoever waits, or makes another step, is told by an exception. A script that ends without either is not, and
        its exit code says nothing: then a line does, from rank 0, which alone knows whether a save is committed."""
        self._unheard = error
        if threading.main_thread().is_alive():
            threading.Thread(target=self._tell_at_the_end, name="gpuctl-unheard").start()
        else:
            self._tell_unheard()

    def _tell_at_the_end(self) -> None:
        while self._unheard is not None and threading.main_thread().is_alive():
            time.sleep(_LOOK_S)
        self._tell_unheard()

    def _tell_unheard(self) -> None:
        with self._lock:
            error, self._unheard = self._unheard, None
        if error is not None:
            say(str(error))

    def _die(self, error: BaseException) -> None:
        """Whoever waits for a save hears of it, and so does whoever makes another one."""
        with self._lock:
            self.died_of = GpuctlError(f"no checkpoints are saved any more: {error!r}")
            self.died_of.__cause__ = error
            self.ended_by = self.ended_by or self.died_of
            for save in self._waiting:
                save.error = self.died_of
            lost = [*self._waiting]
            self._waiting.clear()
            self._thread = None
            self._rests.set()
        for save in lost:
            save.done.set()
        say(str(self.died_of))

    def _settle(self, save: Save) -> None:
        """Until it is committed, or has failed on all ranks."""
        while True:
            number, self._attempts = self._attempts, self._attempts + 1
            report = self._upload(save, folder_of(save.step, self._round, self._mark, number))
            try:
                outcome = self._agree(save, number, report)
            except Scattered as error:
                raise Scattered(f"the checkpoint of step {save.step} was not written: {error.message}") from error
            if not outcome.again:
                break
            self._known, self._base = {}, None
        if outcome.fenced:
            raise Fenced(outcome.fenced, "this process is a leftover and may end")
        if outcome.called_off:
            raise CalledOff(f"the checkpoint of step {save.step} was called off: {outcome.error}")
        if outcome.entry is None:
            raise GpuctlError(f"the checkpoint of step {save.step} was not written: {outcome.error}")
        save.entry = outcome.entry
        self._known = {(part.size, part.blocks): part for part in report.parts}
        self._base = outcome.entry.path
        if self._tiers is not None:
            self._tiers.committed(outcome.entry.path)

    def _upload(self, save: Save, folder: str) -> Report:
        keys = [f"{folder}/{self._world.rank:05d}-{number:04d}" for number in range(len(save.laid.parts()))]
        views = [save.data[low:high] for low, high in save.laid.parts()]

        def count(size: int) -> None:
            save.uploaded += size

        def copy(part: Part, data: memoryview) -> tuple[str, ...]:
            return self._tiers.keep(folder, part, data) if self._tiers is not None else ()

        try:
            items = zip(keys, views, strict=True)
            parts = self._uploader.upload(items, self._known, save.called_off, count, save.tell, copy)
        except CalledOff as error:
            return Report(step=save.step, error=str(error), called_off=True)
        except GpuctlError as error:
            return Report(step=save.step, error=str(error))
        except Exception as error:  # noqa: BLE001 - the other ranks wait for a report
            return Report(step=save.step, error=repr(error))
        return report_of(save.step, save.share, save.laid, parts)

    def _agree(self, save: Save, number: int, report: Report) -> Outcome:
        told = self._gathering.exchange(number, msgspec.json.encode(report))
        if told is None:
            return msgspec.json.decode(self._gathering.outcome(number), type=Outcome)
        outcome = self._commit(save, number, [msgspec.json.decode(text, type=Report) for text in told])
        self._gathering.answer(number, msgspec.json.encode(outcome))
        return outcome

    def _commit(self, save: Save, number: int, reports: list[Report]) -> Outcome:
        """On rank 0."""
        assert self._commits is not None, "only rank 0 commits"
        for rank, report in enumerate(reports):
            if report.error or report.step != save.step:
                what = report.error or f"it saves step {report.step}"
                what = what if len(reports) == 1 else f"rank {rank}: {what}"
                return Outcome(error=what, called_off=any(report.called_off for report in reports))
        try:
            manifest = manifest_of(reports)
            entry = self._entry(save, folder_of(save.step, self._round, self._mark, number), manifest)
            base = self._base if entry.written < entry.bytes else None
            return Outcome(entry=persist(lambda: self._put(save, entry, manifest, base), save.called_off, save.tell))
        except BaseGone as error:
            say(f"{error.message}: the checkpoint of step {save.step} is written whole")
            return Outcome(again=True)
        except Fenced as error:
            return Outcome(fenced=error.message)
        except CalledOff as error:
            return Outcome(error=str(error), called_off=True)
        except GpuctlError as error:
            return Outcome(error=str(error))
        except Exception as error:  # noqa: BLE001 - the other ranks wait for an outcome
            return Outcome(error=repr(error))

    def _put(self, save: Save, entry: CheckpointEntry, manifest: Manifest, base: str | None) -> CheckpointEntry:
        assert self._commits is not None
        now = time.monotonic()
        left_s = None if save.deadline is None else round(save.deadline - now, 3)
        timed = msgspec.structs.replace(entry, at=time.time(), took_s=round(now - save.begun, 3), left_s=left_s)
        return self._commits.commit(timed, manifest, base)

    def _entry(self, save: Save, path: str, manifest: Manifest) -> CheckpointEntry:
        own = sum(part.size for part in manifest.parts if part.key.startswith(f"{path}/"))
        return CheckpointEntry(
            step=save.step,
            round=self._round,
            path=path,
            digest="",
            bytes=sum(part.size for part in manifest.parts),
            written=own,
            world=self._world.size,
            reason=save.reason,
            metrics=save.metrics,
            nodes=tuple(sorted({node for part in manifest.parts for node in part.nodes})),
        )

    def _tidy(self) -> None:
        """The checkpoint is committed: that old ones cannot be deleted now is worth a line, and no job's end."""
        try:
            if self._commits is not None:
                self._commits.tidy(self._may_delete)
        except (StoreError, StoreUnavailable, Damaged) as error:
            say(f"old checkpoints could not be deleted yet: {error}")

    def _may_delete(self) -> bool:
        assert self._commits is not None, "only rank 0 deletes"
        if self._hurried:
            return False
        return not self.in_flight() or self._commits.owed > _MOST_OWED


def say(text: str) -> None:
    """A line for people. The disk that takes it may be the one that is full."""
    with contextlib.suppress(OSError):
        print(f"gpuctl: {text}", file=sys.stderr, flush=True)
