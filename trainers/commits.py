"""The log of committed checkpoints, as global rank 0 keeps it: the fence, the commit, and what may be deleted.

A checkpoint is there once the ledger names it, and not before. The order of things keeps it so: files, then the commit;
a commit without the old ones, then their deletion.
"""

from __future__ import annotations

import re
import time

import msgspec

from gpuctl.cluster.bucket import Store
from gpuctl.cluster.errors import Fenced
from gpuctl.cluster.ledger import Ledger, Version
from gpuctl.cluster.records import CheckpointEntry, CheckpointLog

_FOLDER = re.compile(r"(\d+-r(\d+))/")


class Commits:
    """The log in the folder that ``store`` shows. ``round_number`` is this round's, or ``None`` to take the next one
    that is free (outside of a gpuctl job). ``keep`` is how many checkpoints stay; ``None``: all."""

    def __init__(self, store: Store, round_number: int | None, keep: int | None) -> None:
        self._store = store
        self._ledger = Ledger(store, "ledger", CheckpointLog)
        self._wanted = round_number
        self._keep = keep
        self._version: Version[CheckpointLog] = Version(None, 0)
        self._dropped: list[CheckpointEntry] = []
        self._swept = False
        self.round = 0

    def begin(self) -> tuple[int, tuple[CheckpointEntry, ...]]:
        """Raise the fence to this round, so that no older one commits any more. Returns the round's number and what is
        committed, oldest first.

        Raises ``Fenced`` if a newer round has begun.
        """
        while True:
            self._version = self._ledger.read()
            log = self._log()
            self.round = log.fence + 1 if self._wanted is None else self._wanted
            self._check_fence(log)
            if log.fence == self.round or self._try(msgspec.structs.replace(log, fence=self.round)):
                self._wanted = self.round
                return self.round, self._log().entries

    def commit(self, step: int, path: str, size: int, digests: dict[str, str], world: int) -> None:
        """Make the checkpoint at ``path`` the newest one. Entries of the same or later steps go: a run that went back
        past them (they were damaged) has replaced them.

        Raises ``Fenced`` if a newer round has begun.
        """
        entry = CheckpointEntry(
            step=step, round=self.round, path=path, bytes=size, world=world, at=time.time(), sha256=digests
        )
        while True:
            log = self._log()
            self._check_fence(log)
            entries = (*(old for old in log.entries if old.step < step), entry)
            kept = entries if self._keep is None else entries[-self._keep :]
            if self._try(msgspec.structs.replace(log, entries=kept)):
                paths = {entry.path for entry in kept}
                self._dropped = [old for old in (*self._dropped, *log.entries) if old.path not in paths]
                return
            self._version = self._ledger.read()

    def tidy(self) -> None:
        """Delete the files of entries that a commit has dropped and, once a round, what dead rounds left behind.

        Only folders of lower rounds are looked at: the fence keeps their writers from ever committing them. Raises
        ``StoreError`` or ``StoreUnavailable``; what is left then goes with the next call, or the next round.
        """
        while self._dropped:
            old = self._dropped[-1]
            self._store.delete([f"{old.path}/{name}" for name in old.sha256])
            self._dropped.pop()
        if not self._swept:
            needed = {entry.path for entry in self._log().entries}
            self._store.delete([e.key for e in self._store.list("") if _is_left_over(e.key, needed, self.round)])
            self._swept = True

    def _log(self) -> CheckpointLog:
        return self._version.value or CheckpointLog()

    def _check_fence(self, log: CheckpointLog) -> None:
        if log.fence > self.round:
            raise Fenced(
                f"round {log.fence} of this job has begun, so round {self.round} may not write checkpoints any more",
                "this process is a leftover and may end",
            )

    def _try(self, log: CheckpointLog) -> bool:
        if not self._ledger.commit(log, self._version.number):
            return False
        self._version = Version(log, self._version.number + 1)
        return True


def _is_left_over(key: str, needed: set[str], round_number: int) -> bool:
    folder = _FOLDER.match(key)
    return folder is not None and folder[1] not in needed and int(folder[2]) < round_number
