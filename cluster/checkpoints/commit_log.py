"""The log of committed checkpoints: the fence, the commit, and what may be deleted.

A checkpoint is there once the ledger names it, and not before. The order of things keeps it so: parts, then the
manifest, then the commit; a commit without the old ones, then their deletion. In a job global rank 0 does all this.

A checkpoint may refer to parts of the one before, its *base* (see ``manifest``). That is safe because it can only be
committed while the base is in the log, and a part is only deleted after a commit to that log, when no entry of it needs
the part. So whoever removes the base either does it first, and the commit is refused (``BaseGone``), or later, and
finds the part needed. A base that this round has not written itself may have lost parts in the bucket, though it was
restored, from nearer copies: then the commit is refused as well.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterable, Sequence
from math import isfinite

import msgspec
from msgspec.structs import replace

from gpuctl.cluster.agreement import ledgers
from gpuctl.cluster.agreement.ledger import Version
from gpuctl.cluster.agreement.probe import probe
from gpuctl.cluster.checkpoints.manifest import Manifest, digest, manifest_key, read_manifest
from gpuctl.cluster.checkpoints.retention import Retention
from gpuctl.cluster.errors import Damaged, Fenced, GpuctlError, StoreUnavailable
from gpuctl.cluster.records.checkpoints import CheckpointEntry, CheckpointIndex
from gpuctl.cluster.retry import PAUSES_S
from gpuctl.cluster.storage.interface import Entry, Store

_FOLDER = re.compile(r"\d+-r(\d+)[^/]*/")
_DELETED_AT_ONCE = 64
"""Keys. Whoever wants to break off waits for so many; a store that takes no lists needs 25 ms for each."""


class BaseGone(GpuctlError):
    """The base of an incremental checkpoint was removed meanwhile, or is incomplete: write the checkpoint whole."""


def folder_of(step: int, round_number: int, mark: str, attempt: int) -> str:
    """A folder is written by one attempt only, so that no part is ever written twice: ``mark`` is drawn by each start
    of the workers, which may be several in a round."""
    return f"{step}-r{round_number}.{mark}-{attempt}"


class CommitLog:
    """The log of committed checkpoints in the folder that ``store`` shows. ``round_number`` is this round's, or
    ``None`` to take the next one that is free (outside of a gpuctl job). ``probes``: nobody has probed the bucket yet
    if the log is empty."""

    def __init__(self, store: Store, round_number: int | None, retention: Retention, *, probes: bool = False) -> None:
        self._store = store
        self._probes = probes
        self._ledger = ledgers.checkpoints_in(store)
        self._wanted = round_number
        self._retention = retention
        self._version: Version[CheckpointIndex] = Version(None, 0)
        self._dropped: list[CheckpointEntry] = []
        self._condemned: list[str] = []
        self._swept = False
        self._newest: str | None = None
        self._keys: dict[str, set[str]] = {}
        self.round = 0

    def begin(self) -> tuple[int, tuple[CheckpointEntry, ...]]:
        """Raise the fence to this round, so that no older one commits any more. Returns the round's number and what is
        committed, oldest first.

        Raises ``Fenced`` if a newer round has begun, and ``StoreError`` for a store that cannot decide.
        """
        pauses = iter(PAUSES_S)
        while True:
            try:
                if self._raised():
                    self._wanted = self.round
                    return self.round, self._log().entries
            except StoreUnavailable:
                # The client repeats no listing that breaks off, and no put on a condition. The next look tells.
                pause_s = next(pauses, None)
                if pause_s is None:
                    raise
                time.sleep(pause_s)

    def commit(self, entry: CheckpointEntry, manifest: Manifest, base: str | None = None) -> CheckpointEntry:
        """Write the manifest and make ``entry`` the newest checkpoint; returns it with the manifest's digest. Entries
        of the same or later steps go: a run that went back past them (they were damaged) has replaced them. ``base`` is
        the path of the entry whose parts it refers to.

        Raises ``Fenced`` if a newer round has begun, ``BaseGone``, and ``StoreUnavailable``, after which the same call
        may be made again.
        """
        if base is not None and base != self._newest:
            self._check_parts(manifest, entry.path)
        data = msgspec.json.encode(manifest)
        # JSON has no NaN: it would be written as null, and no one could read the log any more.
        told = {name: float(value) for name, value in entry.metrics.items() if isfinite(value)}
        entry = replace(entry, digest=digest(data), metrics=told)
        self._store.put(manifest_key(entry), data)
        while True:
            log = self._log()
            self._check_fence(log)
            if any(old.path == entry.path for old in log.entries):
                break  # an earlier call has landed after all
            if base is not None and all(old.path != base for old in log.entries):
                raise BaseGone(f"checkpoint {base} was removed while {entry.path} was written")
            kept = self._retention.kept((*(old for old in log.entries if old.step < entry.step), entry))
            try:
                if self._try(replace(log, entries=kept)):
                    self._dropped += [old for old in log.entries if old not in kept]
                    break
            except StoreUnavailable:
                self._version = Version(log, -1)  # unknown: the next call reads
                raise
            self._version = self._ledger.read()
        self._newest = entry.path
        self._remember(entry, manifest.keys() | {manifest_key(entry)})
        return entry

    @property
    def pending_deletions(self) -> int:
        """Dropped checkpoints that are not all deleted yet."""
        return len(self._dropped) + bool(self._condemned)

    def delete_unneeded(self, goes_on: Callable[[], bool] = lambda: True) -> None:
        """Delete what only dropped checkpoints needed and, once a round, what dead rounds left behind; as long as
        ``goes_on``, which is asked before each request or list of keys.

        Raises ``StoreError``, ``StoreUnavailable``, or ``Damaged`` if only another version of gpuctl can read a
        manifest. What is left, then or when it was broken off, goes with the next call, or the next round.
        """
        if (not self.pending_deletions and self._swept) or not goes_on():
            return
        while self.pending_deletions:
            if not self._condemned:
                self._condemned = self._unneeded(self._keys_of(self._dropped[-1]))
                self._dropped.pop()
            if not self._execute(goes_on):
                return
        if not self._swept and goes_on():
            self._condemned = self._unneeded(item.key for item in orphans(self._store, set(), self.round))
            self._swept = True
            self._execute(goes_on)

    def _execute(self, goes_on: Callable[[], bool]) -> bool:
        """Delete what is condemned; ``False`` if that was broken off. Nobody needs it ever again: a checkpoint refers
        only to parts of another one that is in the log."""
        while self._condemned:
            if not goes_on():
                return False
            self._store.delete(self._condemned[:_DELETED_AT_ONCE])
            del self._condemned[:_DELETED_AT_ONCE]
        return True

    def _raised(self) -> bool:
        """Read the log, and raise its fence to this round; ``False`` if somebody else wrote it first."""
        self._version = self._ledger.read()
        if self._probes and self._version.number == 0:
            probe(self._store)
            self._probes = False
        log = self._log()
        self.round = log.fence + 1 if self._wanted is None else self._wanted
        self._check_fence(log)
        return log.fence == self.round or self._try(replace(log, fence=self.round))

    def _check_parts(self, manifest: Manifest, path: str) -> None:
        """That the bucket has what the checkpoint at ``path`` refers to, in its size: one list for each folder. Changed
        bytes are not looked for. Raises ``BaseGone``."""
        referred = [part for part in manifest.parts if _folder(part.key) != path]
        there = {
            item.key: item.size for at in {_folder(part.key) for part in referred} for item in self._store.list(at)
        }
        lost = [part.key for part in referred if there.get(part.key) != part.size]
        if lost:
            raise BaseGone(f"the bucket has lost {len(lost)} of the parts that {path} refers to, such as {lost[0]}")

    def _remember(self, entry: CheckpointEntry, keys: set[str]) -> None:
        """Where checkpoints are dropped, each time it is asked what those that stay need; else hardly ever."""
        if self._retention.last is not None:
            self._keys[entry.path] = keys

    def _unneeded(self, keys: Iterable[str]) -> list[str]:
        """Those that no checkpoint in the log needs. What is in the folder of one is its own, and takes no reading."""
        entries = self._log().entries
        paths = {entry.path for entry in entries}
        found = {key for key in keys if _folder(key) not in paths}
        for entry in entries if found else ():
            found -= self._needed_by(entry)
        paths |= {entry.path for entry in self._dropped}
        self._keys = {path: known for path, known in self._keys.items() if path in paths}
        return sorted(found)

    def _needed_by(self, entry: CheckpointEntry) -> set[str]:
        """The parts that a checkpoint needs outside of its own folder; none where its manifest is lost, as nothing can
        be restored from it."""
        if entry.path not in self._keys:
            try:
                found = needed_by(self._store, [entry])
            except Damaged:
                if not self._is_lost(entry):
                    raise
                found = set()
            self._remember(entry, found)
            return found
        return self._keys[entry.path]

    def _is_lost(self, entry: CheckpointEntry) -> bool:
        """Whether its manifest is not there, or not what was written. Parts may go for it, so this reads it again."""
        data = self._store.get(manifest_key(entry))
        return data is None or digest(data) != entry.digest

    def _keys_of(self, dropped: CheckpointEntry) -> set[str]:
        """What it consisted of; of a damaged one, what is found in its folder."""
        try:
            return self._keys.get(dropped.path) or needed_by(self._store, [dropped])
        except Damaged:
            return {item.key for item in self._store.list(dropped.path)}

    def _log(self) -> CheckpointIndex:
        if self._version.number < 0:
            self._version = self._ledger.read()
        return self._version.value or CheckpointIndex()

    def _check_fence(self, log: CheckpointIndex) -> None:
        if log.fence > self.round:
            raise Fenced(
                f"round {log.fence} of this job has begun, so round {self.round} may not write checkpoints any more",
                "a newer round has replaced this process; exiting",
            )

    def _try(self, log: CheckpointIndex) -> bool:
        if not self._ledger.commit(log, self._version.number):
            return False
        self._version = Version(log, self._version.number + 1)
        return True


def _folder(key: str) -> str:
    return key.rpartition("/")[0]


def needed_by(store: Store, entries: Sequence[CheckpointEntry]) -> set[str]:
    """Keys of all manifests and parts of ``entries``. Raises ``Damaged`` if a manifest cannot be read."""
    return {key for entry in entries for key in read_manifest(store, entry).keys() | {manifest_key(entry)}}


def orphans(store: Store, needed: set[str], fence: int) -> list[Entry]:
    """The objects that rounds below ``fence`` have left and no checkpoint needs. Those rounds commit nothing any more,
    and a later round refers only to what is needed already."""
    found = []
    for item in store.list(""):
        folder = _FOLDER.match(item.key)
        if folder is not None and int(folder[1]) < fence and item.key not in needed:
            found.append(item)
    return found


def remove(store: Store, paths: set[str]) -> int:
    """Commit a log without the checkpoints at ``paths`` first, then delete what only they needed: nobody restores what
    is being deleted. Returns how many bytes became free.

    Raises ``StoreUnavailable`` if the job kept committing meanwhile, ``Damaged`` if the manifest of one that stays
    cannot be read, and with it what it needs; then nothing is deleted.
    """

    def without(log: CheckpointIndex | None) -> CheckpointIndex | None:
        log = log or CheckpointIndex()
        kept = tuple(entry for entry in log.entries if entry.path not in paths)
        if kept and kept[-1] is not log.entries[-1]:
            # Nodes dropped their copies of it when the one was committed that goes now.
            kept = (*kept[:-1], replace(kept[-1], nodes=()))
        return None if len(kept) == len(log.entries) else replace(log, entries=kept)

    log, kept = ledgers.checkpoints_in(store).update(without, "the job kept committing checkpoints meanwhile")
    if log is None or kept is None:
        return 0
    gone = [entry for entry in log.entries if entry.path in paths]
    needed = needed_by(store, kept.entries)
    candidates: set[str] = set()
    for entry in gone:
        with contextlib.suppress(Damaged):
            candidates |= read_manifest(store, entry).keys()
        candidates |= {item.key for item in store.list(entry.path)}
    sizes = {item.key: item.size for item in store.list("") if item.key in candidates - needed}
    store.delete(sorted(sizes))
    return sum(sizes.values())
