"""When what lies in a folder that somebody writes to is whole: a rule by names, times and open files, without reading.

``docs/decisions/0010-files-without-code.md`` has the reasons.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Set

from gpuctl.bootstrap.folder import Sign

_RESTLESS_TIMES = 3
"""How many times the quiet time a file that is closed, and so whole by itself, holds the others back."""
RESTLESS_S = 600.0
"""For how long one does that is open."""

_LOG = re.compile(r"tfevents|\.(log|csv|jsonl|wandb)$")
_UNFINISHED = re.compile(r"(^|/)(tmp-|\.tmp)|\.(tmp|temp|partial|part|incomplete)($|[./])")


def is_unfinished(path: str) -> bool:
    """Whether a file's name says that it is being written. Such files are never part of a set."""
    return _UNFINISHED.search(path) is not None


class Stillness:
    """Follows one folder from look to look. ``quiet_s``: seconds without a change after which a file is at rest."""

    def __init__(self, seen: Mapping[str, Sign], quiet_s: float) -> None:
        self.seen = seen
        self._quiet_s = quiet_s
        self._changed_at: dict[str, float] = {}
        self._restless_since: dict[str, float] = {}
        self._removed_at = float("-inf")

    @property
    def is_restless(self) -> bool:
        """Whether some file was not at rest at the last look: the next one may find it so, though nothing changed."""
        return bool(self._restless_since)

    def look(self, seen: Mapping[str, Sign], opened: Set[str], now: float) -> list[str] | None:
        """The files that make a set, or ``None`` while one would not be whole.

        ``opened`` are those that somebody has open for writing, found out after ``seen``; ``now`` is in seconds of any
        clock that does not go backwards.
        """
        for path in seen:
            if path in opened or seen[path] != self.seen.get(path):
                self._changed_at[path] = now
        if not all(map(is_unfinished, self.seen.keys() - seen.keys())):
            self._removed_at = now
        self.seen = seen
        restless = {path for path, at in self._changed_at.items() if path in seen and now - at < self._quiet_s}
        self._changed_at = {path: self._changed_at[path] for path in restless}
        self._restless_since = {path: self._restless_since.get(path, now) for path in restless}
        if now - self._removed_at < self._quiet_s:
            return None
        for path, since in self._restless_since.items():
            patience = RESTLESS_S if path in opened else _RESTLESS_TIMES * self._quiet_s
            if not _LOG.search(path) and now - since < patience:
                return None
        return [path for path in seen if path not in opened and not is_unfinished(path)]
