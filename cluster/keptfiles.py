"""The files that a job's script has kept (see ``filesets``), from outside of the job: check them, delete them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpuctl.cluster import filesets, jobs, layout
from gpuctl.cluster.blocks import each
from gpuctl.cluster.bucket import Bucket, Entry, Store
from gpuctl.cluster.errors import CorruptRecord, GpuctlError, StoreUnavailable
from gpuctl.cluster.records import FileLog, FileSet, StoredFile

_TRIES = 20


@dataclass(frozen=True, slots=True)
class Checked:
    """What was found of one set."""

    kept: FileSet
    faults: tuple[str, ...]
    """Sentences, each of which names a file and what is wrong with it."""

    @property
    def whole(self) -> bool:
        return not self.faults


def sets(store: Store, job: str) -> tuple[FileSet, ...]:
    """Oldest first; a round begins with the last one, or the one before if that is damaged."""
    log = filesets.ledger(store, job).read().value
    return log.sets if log else ()


def objects(store: Store, job: str) -> list[Entry]:
    """All that lies in the bucket for a job's files, in a set or not."""
    return store.list(_blobs(job))


def bytes_to_verify(kept: Sequence[FileSet]) -> int:
    """What ``verify`` is going to read."""
    return sum(file.size for file in _by_blob(kept).values())


def verify(
    store: Bucket, job: str, kept: Sequence[FileSet], on_bytes: Callable[[int], None] = lambda _: None
) -> list[Checked]:
    """Read and check every byte of the sets; a file that is in several is read once. Holds 48 MiB at most. Sets that
    the job replaces meanwhile are left out if they are not whole. ``on_bytes`` is called from several threads."""
    faults: dict[str, str] = {}

    def read(file: StoredFile) -> str:
        try:
            for chunk in filesets.read(store, f"{_blobs(job)}/{file.blob}", file):
                on_bytes(len(chunk))
        except CorruptRecord as error:
            return error.message
        return ""

    def note(file: StoredFile, fault: str) -> None:
        if fault:
            faults[file.blob] = fault

    files = _by_blob(kept).values()
    each((file for file in files if file.size <= filesets.CHUNK_BYTES), read, note)
    for file in files:
        if file.size > filesets.CHUNK_BYTES:  # read several chunks at a time itself
            note(file, read(file))
    found = [Checked(one, _faults_of(one, faults)) for one in kept]
    if all(one.whole for one in found):
        return found
    still = sets(store, job)
    return [one for one in found if one.whole or one.kept in still]


def check_over(store: Store, job: str) -> None:
    """Refuse a job that may go on: its next round begins with these files, and its nodes count on what they uploaded.

    Raises ``GpuctlError``.
    """
    if jobs.outcome(store, job) is None:
        raise GpuctlError(
            f"job {job} is not over, and goes on with its files",
            f"end it first: gpuctl cancel {job}; or name the steps that are to go",
        )


def remove(store: Store, job: str) -> int:
    """Delete all files of a job that is over; returns how many bytes became free.

    The ledger first: it names no file any more, and its fence is above the last round, so that a node which has not
    heard of the end commits nothing that is being deleted. Raises ``GpuctlError`` if the job is not over, and
    ``StoreUnavailable``.
    """
    check_over(store, job)
    last = jobs.rounds(store, job).read().value
    ledger = filesets.ledger(store, job)
    for _ in range(_TRIES):
        version = ledger.read()
        log = version.value or FileLog()
        empty = FileLog(fence=max(log.fence, last.number + 1 if last else 0))
        if log == empty or ledger.commit(empty, version.number):
            break
    else:
        raise StoreUnavailable(f"job {job} kept committing files meanwhile", "try again")
    gone = objects(store, job)
    store.delete([entry.key for entry in gone])
    return sum(entry.size for entry in gone)


def _blobs(job: str) -> str:
    return f"{layout.files(job)}/blobs"


def _by_blob(kept: Sequence[FileSet]) -> dict[str, StoredFile]:
    """Without links, which have no content."""
    return {file.blob: file for one in kept for file in one.files.values() if file.blob}


def _faults_of(kept: FileSet, faults: dict[str, str]) -> tuple[str, ...]:
    return tuple(f"{path}: {faults[file.blob]}" for path, file in sorted(kept.files.items()) if file.blob in faults)
