"""When what lies in a folder that somebody writes to is whole: a rule by names, times and open files, without reading.

``docs/decisions/0010-files-without-code.md`` has the reasons.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Set

from gpuctl.bootstrap.mirror.watched_folder import FileStamp

_RESTLESS_TIMES = 3
"""For how many times the quiet time files that are closed, and so whole by themselves, hold the others back."""
RESTLESS_S = 600.0
"""For how long they do if one of them is open."""

_LOG = re.compile(r"tfevents|\.(log|csv|jsonl|wandb)$")
_UNFINISHED = re.compile(r"(^|/)(tmp-|\.tmp)|\.(tmp|temp|partial|part|incomplete)($|[./])")


def is_log(path: str) -> bool:
    """Whether a file's name says that it only ever grows. Such files hold nothing back, and a set may lack one."""
    return _LOG.search(path) is not None


def is_unfinished(path: str) -> bool:
    """Whether a file's name says that it is being written. Such files are never part of a set."""
    return _UNFINISHED.search(path) is not None


class QuiescenceTracker:
    """Tells which files of one folder are at rest, from look to look. ``quiet_s``: seconds without a change after which
    a file is at rest."""

    def __init__(self, seen: Mapping[str, FileStamp], quiet_s: float) -> None:
        self.seen = seen
        self.loose: Set[str] = frozenset()
        """Those files of the last set that held nothing back: if one changes while it is copied, it is left out."""
        self._quiet_s = quiet_s
        self._changed_at: dict[str, float] = {}
        self._restless_since: dict[str, float] = {}
        self._removed_at = float("-inf")
        self._removed = False
        """Whether something was since the last set that was made."""
        self._unrest_since: float | None = None
        """When the folder was last still, or a set was made. One clock for all files: a script that makes a new one
        twice a second has none that is restless for long."""
        self._open_at = float("-inf")

    @property
    def is_restless(self) -> bool:
        """Whether the last look waits for something, if only for its own clock to stop: the next one may find the
        folder still, though nothing changed."""
        return bool(self._restless_since) or self._unrest_since is not None

    def look(self, seen: Mapping[str, FileStamp], opened: Set[str], now: float) -> list[str] | None:
        """The files that make a set, or ``None`` while one would not be whole.

        ``opened`` are those that somebody has open for writing, found out after ``seen``; ``now`` is in seconds of any
        clock that does not go backwards.
        """
        for path in seen:
            if path in opened or seen[path] != self.seen.get(path):
                self._changed_at[path] = now
        if not all(map(is_unfinished, self.seen.keys() - seen.keys())):
            self._removed_at = now
            self._removed = True
        self.seen = seen
        restless = {path for path, at in self._changed_at.items() if path in seen and now - at < self._quiet_s}
        self._changed_at = {path: self._changed_at[path] for path in restless}
        self._restless_since = {path: self._restless_since.get(path, now) for path in restless}
        left_out: Set[str]
        holding = {path for path in restless if self._holds(path, path in opened, now)}
        if not holding and now - self._removed_at >= self._quiet_s:
            self._unrest_since = None
            left_out = opened
        elif self._has_patience(bool(holding & opened), now):
            return None
        else:
            self._unrest_since = now
            # Who also removes the older files has nothing that is at rest; without the newest ones it had nothing.
            left_out = opened | (set() if self._removed else holding)
        chosen = [path for path in seen if path not in left_out and not is_unfinished(path)]
        self.loose = {path for path in chosen if is_log(path) or (path in restless and not self._removed)}
        return chosen

    def made(self) -> None:
        """The last set that ``look`` told is in the bucket."""
        self._removed = False

    def _holds(self, path: str, is_open: bool, now: float) -> bool:
        """Whether a restless file still holds the others back: one that never rests does not for ever."""
        patience = RESTLESS_S if is_open else _RESTLESS_TIMES * self._quiet_s
        return not is_log(path) and now - self._restless_since[path] < patience

    def _has_patience(self, is_open: bool, now: float) -> bool:
        """Whether to go on waiting for a folder where something is restless, and open for writing if ``is_open``."""
        if self._unrest_since is None:
            self._unrest_since = now
        if is_open:
            self._open_at = now
        # Counted anew when a file is closed: it is then the last one of a set, and needs its time to be at rest.
        closed_for_s = now - max(self._unrest_since, self._open_at)
        return closed_for_s < _RESTLESS_TIMES * self._quiet_s and now - self._unrest_since < RESTLESS_S
