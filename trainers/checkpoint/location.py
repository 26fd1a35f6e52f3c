"""The checkpoint folder that a process reads or writes, and the round that it is in there."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from gpuctl.cluster import layout
from gpuctl.cluster.agreement import ledgers
from gpuctl.cluster.agreement.probe import probe
from gpuctl.cluster.checkpoints.commit_log import CommitLog
from gpuctl.cluster.checkpoints.manifest import Manifest
from gpuctl.cluster.checkpoints.retention import Retention
from gpuctl.cluster.errors import BadInput
from gpuctl.cluster.records.checkpoints import CheckpointEntry
from gpuctl.cluster.storage.bucket import Bucket, open_bucket
from gpuctl.cluster.storage.interface import PartStore
from gpuctl.cluster.worker_context import WorkerContext

_PATIENCE_S = 60.0
_TIMEOUT_S = 300.0
"""For one request: a part of 64 MiB takes its time on a slow line."""

_opening = threading.Lock()
_opened: dict[tuple[str | None, WorkerContext | None], CheckpointLocation] = {}
_places: dict[tuple[str, int | None], CheckpointLocation] = {}
"""Each once, however it was spelled: two would fence each other."""


class CheckpointLocation:
    """Where a job's checkpoints are, as this process sees it. In the job's own folder the round is the job's; anywhere
    else the process takes a new one with its first save, and keeps it. Thread-safe."""

    def __init__(self, store: PartStore, number: int | None = None) -> None:
        self.store = store
        self._is_own = number is not None
        self._number = number
        self._proven = self._is_own
        self._lock = threading.Lock()
        self._commits: dict[Retention, CommitLog] = {}

    def begin(self, retention: Retention) -> None:
        """The coordinator's part of the beginning of a save: raise the fence. Raises ``Fenced``, and ``StoreError`` for
        a store that cannot decide."""
        with self._lock:
            if not self._proven:
                probe(self.store)
                self._proven = True
            commits = self._commits.setdefault(retention, CommitLog(self.store, self._number, retention))
            self._number, _ = commits.begin()

    def round(self, is_coordinator: bool) -> int:
        """Once the coordinator has begun. Another process looks it up, unless it is the job's."""
        with self._lock:
            if self._number is not None and (is_coordinator or self._is_own):
                return self._number
        log = ledgers.checkpoints_in(self.store).read().value
        return log.fence if log else 0

    def entries(self) -> tuple[CheckpointEntry, ...]:
        """What is committed, oldest first. A job that looks for what to restore raises its fence first, so that nothing
        older is committed any more. Raises ``Fenced``."""
        if self._is_own:
            return CommitLog(self.store, self._number, Retention(last=None)).begin()[1]
        log = ledgers.checkpoints_in(self.store).read().value
        return log.entries if log else ()

    def commit(self, entry: CheckpointEntry, manifest: Manifest, retention: Retention) -> CheckpointEntry:
        """Commit a checkpoint. Raises what ``CommitLog.commit`` does."""
        with self._lock:
            return self._commits[retention].commit(entry, manifest)

    def delete_unneeded(self, retention: Retention) -> None:
        """Delete what retention does not keep. Raises what ``CommitLog.delete_unneeded`` does."""
        with self._lock:
            self._commits[retention].delete_unneeded()


def place_of(url: str | None) -> CheckpointLocation:
    """The one at ``url``, a bucket URL or a local path; ``None``: the job's own. The same each time.

    Raises ``BadInput`` if there is no job.
    """
    context = WorkerContext.from_env()
    with _opening:
        if (url, context) not in _opened:
            _opened[url, context] = _open(url, context)
        return _opened[url, context]


def folder_at(url: str) -> Bucket:
    """``url`` is a bucket URL or a local path."""
    address = url if "://" in url else Path(url).absolute().as_uri()
    return open_bucket(address, patience_s=_PATIENCE_S, timeout_s=_TIMEOUT_S)


def own_folder(context: WorkerContext) -> Bucket:
    """The job's, in a bucket that the cluster has proven already."""
    bucket = open_bucket(context.bucket, patience_s=_PATIENCE_S, timeout_s=_TIMEOUT_S)
    return bucket.at(layout.checkpoints(context.job))


def _open(url: str | None, context: WorkerContext | None) -> CheckpointLocation:
    own = None if context is None else own_folder(context)
    found = own if url is None else folder_at(url)
    if found is None:
        raise BadInput("outside a gpuctl job there is no default checkpoint folder", "give the URL of a folder")
    number = context.round if context is not None and own is not None and found.url == own.url else None
    return _places.setdefault((found.url, number), CheckpointLocation(found, number))


def step_of(checkpoint_id: object) -> int:
    """A checkpoint is known by its step. Raises ``BadInput`` for what is none."""
    text = str(os.fspath(checkpoint_id) if isinstance(checkpoint_id, os.PathLike) else checkpoint_id)
    if not text.isdecimal():
        raise BadInput(f"{text!r} is not a number of optimizer steps", "use 0 or more")
    return int(text)
