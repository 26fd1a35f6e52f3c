"""Room on a node's disk: old folders go, so that one that lives for months does not fill up.

Of jobs that are over, the newest three stay, for whoever wants to look at them (``gpuctl cp :jobs/JOB/…``), until the
disk is 95 % full; others stay for a day, or until it is 80 % full. The same goes for the rounds of a job that still
runs, of which the newest three always stay. What has not reached the bucket yet stays for a week, in case it is all
there is of it.
"""

from __future__ import annotations

import math
import shutil
import threading
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from gpuctl.cluster.clock import Clock
from gpuctl.cluster.disk import used_share
from gpuctl.cluster.errors import GpuctlError
from gpuctl.cluster.jobs import queue
from gpuctl.cluster.storage.interface import Store

UNSENT = "unsent"
"""In a round's folder while some of what it printed is not in the bucket; with a suffix, for other things."""
_ENDED = "ended"
"""In a job's folder, once it is known that the job is over: when that was."""
_NEWEST = 3
_KEPT_S = 24 * 3600.0
_UNSENT_S = 7 * 24 * 3600.0
_FULL = 0.8
_VERY_FULL = 0.95
_EVERY_S = 3600.0


@dataclass(frozen=True, slots=True)
class _Old:
    folder: Path
    age_s: float
    """Since its end."""
    unsent: bool
    what: str
    """For people."""


class OldJobs:
    """Removes finished jobs' files from ``folder`` when the disk fills up. ``used`` tells how full its disk is, from 0
    to 1."""

    def __init__(
        self,
        folder: Path,
        store: Store,
        clock: Clock,
        say: Callable[[str], None],
        used: Callable[[Path], float] = used_share,
    ) -> None:
        self._folder = folder
        self._store = store
        self._clock = clock
        self._say = say
        self._used = used
        self._swept_at: float | None = None
        self._busy = threading.Lock()

    def sweep_soon(self, unfinished: Collection[str], *, has_news: bool) -> None:
        """Sweep in the background, if a job has ended (``has_news``) or an hour has passed."""
        now = self._clock.monotonic()
        if has_news or self._swept_at is None or now - self._swept_at > _EVERY_S:
            self._swept_at = now
            threading.Thread(target=self.sweep, args=(frozenset(unfinished),), name="old-jobs", daemon=True).start()

    def sweep(self, unfinished: Collection[str]) -> None:
        """Remove what may go now. Without an answer from the bucket, nothing does."""
        with self._busy:
            try:
                over = _newest_first(self._over(unfinished))
                rounds = [one for job in unfinished for one in _newest_first(self._rounds(job))[_NEWEST:]]
            except (GpuctlError, OSError):
                return
            for one in reversed(_newest_first([*over[_NEWEST:], *rounds])):
                if self._may_go(one, _FULL, _KEPT_S):
                    self._remove(one)
            for one in reversed(over[:_NEWEST]):
                if self._may_go(one, _VERY_FULL, math.inf):
                    self._remove(one)

    def _over(self, unfinished: Collection[str]) -> list[_Old]:
        found = []
        for folder in self._folder.iterdir() if self._folder.is_dir() else ():
            ended = folder / _ENDED
            if folder.name in unfinished or not folder.is_dir():
                continue
            if not ended.exists():
                if queue.outcome(self._store, folder.name) is None:
                    continue
                ended.touch()
            age_s = self._clock.time() - ended.stat().st_mtime
            found.append(_Old(folder, age_s, any(folder.glob(f"rounds/*/{UNSENT}*")), f"finished job {folder.name}"))
        return found

    def _rounds(self, job: str) -> list[_Old]:
        """Those of a job that still runs, by when something was last put into their folders."""
        found = []
        for folder in (self._folder / job / "rounds").glob("[0-9]*"):
            age_s = self._clock.time() - folder.stat().st_mtime
            found.append(_Old(folder, age_s, any(folder.glob(f"{UNSENT}*")), f"round {int(folder.name)} of {job}"))
        return found

    def _may_go(self, one: _Old, full: float, kept_s: float) -> bool:
        if one.unsent:
            return one.age_s > max(_UNSENT_S, kept_s)
        return one.age_s > kept_s or self._used(self._folder) > full

    def _remove(self, one: _Old) -> None:
        self._say(f"removing the files of {one.what}")
        shutil.rmtree(one.folder, ignore_errors=True)


def _newest_first(found: Iterable[_Old]) -> list[_Old]:
    return sorted(found, key=lambda one: one.age_s)
