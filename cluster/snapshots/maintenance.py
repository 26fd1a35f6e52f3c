"""The files that a job's script has kept (see ``snapshot_log``), from outside of the job: check them, delete them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpuctl.cluster import layout
from gpuctl.cluster.agreement import ledgers
from gpuctl.cluster.concurrency import read_each
from gpuctl.cluster.errors import CorruptRecord, GpuctlError
from gpuctl.cluster.jobs import queue
from gpuctl.cluster.records.snapshots import Snapshot, SnapshotIndex, StoredFile
from gpuctl.cluster.snapshots import snapshot_log
from gpuctl.cluster.storage.bucket import Bucket
from gpuctl.cluster.storage.interface import Entry, Store


@dataclass(frozen=True, slots=True)
class SnapshotCheck:
    """The result of checking one snapshot."""

    kept: Snapshot
    faults: tuple[str, ...]
    """Sentences, each of which names a file and what is wrong with it."""

    @property
    def whole(self) -> bool:
        return not self.faults


def sets(store: Store, job: str) -> tuple[Snapshot, ...]:
    """Oldest first; a round begins with the last one, or the one before if that is damaged."""
    log = ledgers.files(store, job).read().value
    return log.sets if log else ()


def objects(store: Store, job: str) -> list[Entry]:
    """All that lies in the bucket for a job's files, in a set or not."""
    return store.list(_blobs(job))


def bytes_to_verify(kept: Sequence[Snapshot]) -> int:
    """What ``verify`` is going to read."""
    return sum(file.size for file in _by_blob(kept).values())


def verify(
    store: Bucket, job: str, kept: Sequence[Snapshot], on_bytes: Callable[[int], None] = lambda _: None
) -> list[SnapshotCheck]:
    """Read and check every byte of the sets; a file that is in several is read once. Holds 48 MiB at most. Sets that
    the job replaces meanwhile are left out if they are not whole. ``on_bytes`` is called from several threads."""
    faults: dict[str, str] = {}

    def read(file: StoredFile) -> str:
        try:
            for chunk in snapshot_log.read(store, f"{_blobs(job)}/{file.blob}", file):
                on_bytes(len(chunk))
        except CorruptRecord as error:
            return error.message
        return ""

    def note(file: StoredFile, fault: str) -> None:
        if fault:
            faults[file.blob] = fault

    files = _by_blob(kept).values()
    read_each((file for file in files if file.size <= snapshot_log.CHUNK_BYTES), read, note)
    for file in files:
        if file.size > snapshot_log.CHUNK_BYTES:  # read several chunks at a time itself
            note(file, read(file))
    found = [SnapshotCheck(one, _faults_of(one, faults)) for one in kept]
    if all(one.whole for one in found):
        return found
    still = sets(store, job)
    return [one for one in found if one.whole or one.kept in still]


def check_over(store: Store, job: str) -> None:
    """Refuse a job that may go on: its next round begins with these files, and its nodes count on what they uploaded.

    Raises ``GpuctlError``.
    """
    if queue.outcome(store, job) is None:
        raise GpuctlError(
            f"job {job} is still running and uses its files",
            f"cancel it first: gpuctl cancel {job}; or name the steps to delete",
        )


def remove(store: Store, job: str) -> int:
    """Delete all files of a job that is over; returns how many bytes became free.

    The ledger first: it names no file any more, and its fence is above the last round, so that a node which has not
    heard of the end commits nothing that is being deleted. Raises ``GpuctlError`` if the job is not over, and
    ``StoreUnavailable``.
    """
    check_over(store, job)
    last = ledgers.rounds(store, job).read().value

    def emptied(log: SnapshotIndex | None) -> SnapshotIndex | None:
        log = log or SnapshotIndex()
        empty = SnapshotIndex(fence=max(log.fence, last.number + 1 if last else 0))
        return None if log == empty else empty

    ledgers.files(store, job).update(emptied, f"job {job} kept committing files meanwhile")
    gone = objects(store, job)
    store.delete([entry.key for entry in gone])
    return sum(entry.size for entry in gone)


def _blobs(job: str) -> str:
    return f"{layout.files(job)}/blobs"


def _by_blob(kept: Sequence[Snapshot]) -> dict[str, StoredFile]:
    """Files by blob, without links, which have no content."""
    return {file.blob: file for one in kept for file in one.files.values() if file.blob}


def _faults_of(kept: Snapshot, faults: dict[str, str]) -> tuple[str, ...]:
    return tuple(f"{path}: {faults[file.blob]}" for path, file in sorted(kept.files.items()) if file.blob in faults)
