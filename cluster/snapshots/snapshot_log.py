"""What scripts write under ``$GPUCTL_CHECKPOINT_DIR``, as sets of files in the bucket: the log, the fence, the blobs.

A set is there once the ledger names it, and not before. Each node of a round tells what it changed since the round
began, and the set is what the round began with and all of that; where two nodes changed one path, the lower rank wins.
So a copy that a node merely has from before never hides what another one wrote.

A blob is named for its content and for the upload that made it. It is deleted once no set names it, and a name is never
used again: whoever still counts on it finds it missing in the log, and uploads anew, before it can commit.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, BinaryIO

from msgspec.structs import replace

from gpuctl.cluster import layout
from gpuctl.cluster.agreement import ledgers
from gpuctl.cluster.clock import Clock
from gpuctl.cluster.errors import CorruptRecord, Fenced, GpuctlError, StoreError, StoreUnavailable
from gpuctl.cluster.records.snapshots import Snapshot, SnapshotIndex, StoredFile
from gpuctl.cluster.storage.bucket import Bucket
from gpuctl.cluster.storage.error_mapping import is_no_bucket
from gpuctl.cluster.storage.interface import Store

if TYPE_CHECKING:
    from obstore.store import ObjectStore

KEPT_SETS = 2
CHUNK_BYTES = 8 << 20
_AT_ONCE = 4
"""Chunks of a file on their way: 32 MiB of memory."""
_MOST_PARTS = 9000
"""S3 takes 10,000 parts of an upload."""
_BLOB = re.compile(r"[0-9a-f]{64}-r(\d+)-\d+-\d+")

Files = dict[str, StoredFile]
Changes = dict[str, StoredFile | None]


class FileChanged(GpuctlError):
    """A file changed while it was read."""


class TransferCancelled(Exception):
    """Raised by an ``on_chunk`` to cancel a transfer."""


def newest(store: Store, job: str) -> Snapshot | None:
    """The newest set of a job."""
    log = ledgers.files(store, job).read().value
    return log.sets[-1] if log and log.sets else None


def read(store: Bucket, key: str, file: StoredFile) -> Iterator[memoryview]:
    """The content of ``file``, which is the object at ``key``, in chunks of ``CHUNK_BYTES``. Raises ``CorruptRecord``
    if it is missing or damaged; the latter may be known only after the last chunk."""
    size = _size(store, key)
    if size != file.size:
        raise CorruptRecord(f"{key} is missing" if size is None else f"{key} has {size} bytes, not {file.size}")
    hashing = hashlib.sha256()
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        try:
            for chunk in _ranges(store, key, file.size, pool):
                hashing.update(chunk)
                yield chunk
        except FileNotFoundError as error:
            raise CorruptRecord(f"{key} is missing") from error
    if hashing.hexdigest() != file.sha256:
        raise CorruptRecord(f"{key} is damaged: its SHA-256 does not match")


class SnapshotLog:
    """The snapshots of one job, as the node with rank ``rank`` sees them in round ``round_number``. Not thread-safe.

    All methods raise ``StoreUnavailable`` with nothing lost; call again. All but ``upload`` and ``fetch`` raise
    ``Fenced`` if a newer round has begun.
    """

    def __init__(self, store: Bucket, job: str, round_number: int, rank: int, clock: Clock) -> None:
        self._store = store
        self._blobs = f"{layout.files(job)}/blobs"
        self._ledger = ledgers.files(store, job)
        self._round = round_number
        self._rank = rank
        self._clock = clock
        self._named: dict[str, str] = {}
        self._fresh: dict[str, str] = {}
        self._uploads = 0
        self._swept = False

    def begin(self) -> Files:
        """Raise the fence to this round, so that no older one commits any more. Returns what the round begins with,
        which is the same for all of its nodes."""
        while True:
            version = self._ledger.read()
            log = self._checked(version.value)
            if log.fence < self._round:
                base = log.sets[-1].files if log.sets else {}
                log = replace(log, fence=self._round, base=base, changes={})
                if not self._ledger.commit(log, version.number):
                    continue
            self._named = _by_digest(log)
            for path, file in log.base.items():
                _check_path(path, file)
            return log.base

    def commit(self, changes: Changes) -> list[str]:
        """Make the set that has this node's ``changes``. Returns nothing if it did, else the paths whose blobs were
        deleted meanwhile: ``upload`` them and call again."""
        while True:
            version = self._ledger.read()
            log = self._checked(version.value)
            self._named = _by_digest(log)
            there = {*self._named.values(), *self._fresh.values()}
            if missing := [path for path, file in changes.items() if file and file.blob and file.blob not in there]:
                return missing
            new = self._with(log, changes)
            if log.changes.get(self._rank, {}) == changes and new.sets == log.sets:
                return []  # nothing new, or an answer that was lost
            if self._ledger.commit(new, version.number):
                self._tidy(log, new)
                return []

    def forget(self, blob: str) -> None:
        """Drop the sets that need a blob that is damaged, and begin the next round with the newest of the others.

        This round is over with that: its commits are fenced. Raises ``CorruptRecord`` if no other set is left.
        """
        while True:
            version = self._ledger.read()
            log = self._checked(version.value)
            kept = tuple(s for s in log.sets if all(file.blob != blob for file in s.files.values()))
            if not kept:
                raise CorruptRecord(
                    f"{self._blobs}/{blob} is missing or damaged, and there is no snapshot without it",
                    "submit the job again under another name",
                )
            new = SnapshotIndex(fence=self._round + 1, base=kept[-1].files, sets=kept)
            if self._ledger.commit(new, version.number):
                return

    def blob_of(self, digest: str) -> str | None:
        """A blob with this content, if one is known."""
        return self._fresh.get(digest) or self._named.get(digest)

    def upload(self, file: BinaryIO, size: int, digest: str, on_chunk: Callable[[], None]) -> str:
        """Put the first ``size`` bytes of ``file`` in the bucket; returns the name of the blob.

        Holds 40 MiB at most. Raises ``FileChanged`` if they are not what ``digest`` says; there is no blob then, and
        whatever ``on_chunk`` raises.
        """
        import obstore

        self._uploads += 1
        name = f"{digest}-r{self._round:06d}-{self._rank}-{self._uploads}"
        key = f"{self._blobs}/{name}"
        if size <= CHUNK_BYTES:
            self._store.put(key, b"".join(_read(file, size, digest, on_chunk)))
        else:
            chunk = max(CHUNK_BYTES, -(-size // _MOST_PARTS))

            def put(store: ObjectStore) -> None:
                # An iterator that raises aborts the upload: what it would have made never appears.
                chunks = _read(file, size, digest, on_chunk)
                obstore.put(store, key, chunks, use_multipart=True, chunk_size=chunk, max_concurrency=_AT_ONCE)

            self._store.ask(key, put)
        self._fresh[digest] = name
        return name

    def fetch(self, file: StoredFile, path: Path, on_chunk: Callable[[], None]) -> None:
        """Write the content of ``file`` to ``path``. Raises ``CorruptRecord`` if it is missing or damaged."""
        with path.open("wb") as out:
            for chunk in read(self._store, f"{self._blobs}/{file.blob}", file):
                out.write(chunk)
                on_chunk()
        if file.modified_ns:
            os.utime(path, ns=(file.modified_ns, file.modified_ns))

    def _checked(self, log: SnapshotIndex | None) -> SnapshotIndex:
        log = log or SnapshotIndex()
        if log.fence > self._round:
            raise Fenced(f"round {log.fence} of this job has begun, so round {self._round} may not keep files any more")
        return log

    def _with(self, log: SnapshotIndex, changes: Changes) -> SnapshotIndex:
        everyone = {**log.changes, self._rank: changes}
        files = merged(log.base, everyone)
        sets = log.sets
        if files != (sets[-1].files if sets else {}):
            sets = (*sets, Snapshot(round=self._round, files=files, at=self._clock.time()))[-KEPT_SETS:]
        return replace(log, changes=everyone, sets=sets)

    def _tidy(self, old: SnapshotIndex, new: SnapshotIndex) -> None:
        """Delete what ``new`` names no more and, once a round, what dead rounds left behind: nobody can commit that."""
        needed = set(_blobs(new))
        idle = {*_blobs(old), *self._fresh.values()} - needed
        self._fresh = {}
        self._named = _by_digest(new)
        try:
            if not self._swept:
                names = (entry.key.removeprefix(f"{self._blobs}/") for entry in self._store.list(self._blobs))
                idle |= {n for n in names if (m := _BLOB.fullmatch(n)) and int(m[1]) < self._round} - needed
            self._store.delete(f"{self._blobs}/{name}" for name in sorted(idle))
            self._swept = True
        except (StoreError, StoreUnavailable):
            self._swept = False  # the next round's first sweep takes what this one's does not


def merged(base: Files, changes: dict[int, Changes]) -> Files:
    """``base`` with all ``changes``; the lowest rank has the last word."""
    files = dict(base)
    for rank in sorted(changes, reverse=True):
        for path, file in changes[rank].items():
            if file is None:
                files.pop(path, None)
            else:
                files[path] = file
    # One node's file where another has a folder: nothing could restore both.
    return {path: f for path, f in files.items() if not any(str(p) in files for p in PurePosixPath(path).parents)}


def _blobs(log: SnapshotIndex) -> Iterator[str]:
    return (file.blob for file in _files(log) if file.blob)


def _by_digest(log: SnapshotIndex) -> dict[str, str]:
    return {file.sha256: file.blob for file in _files(log) if file.blob}


def _files(log: SnapshotIndex) -> Iterator[StoredFile]:
    yield from log.base.values()
    for files in log.sets:
        yield from files.files.values()
    for changes in log.changes.values():
        yield from filter(None, changes.values())


def _check_path(path: str, file: StoredFile) -> None:
    """Nothing outside of the folder is ever written, whatever the ledger says."""
    parts = PurePosixPath(path).parts
    target = os.path.normpath(PurePosixPath(path).parent / file.link)
    if not parts or ".." in parts or parts[0] == "/" or target.startswith(("..", "/")):
        raise CorruptRecord(f"the ledger names a file outside of the checkpoint folder: {path!r}")


def _read(file: BinaryIO, size: int, digest: str, on_chunk: Callable[[], None]) -> Iterator[bytes]:
    """The first ``size`` bytes in chunks; raises ``FileChanged`` before the last one if they are not ``digest``'s."""
    file.seek(0)
    hashing = hashlib.sha256()
    left = size
    while left:
        on_chunk()
        chunk = file.read(min(left, CHUNK_BYTES))
        left -= len(chunk)
        hashing.update(chunk)
        if not chunk or (not left and hashing.hexdigest() != digest):
            raise FileChanged(f"{file.name} was written to while it was copied")
        yield chunk


def _size(store: Bucket, key: str) -> int | None:
    import obstore

    def size(raw: ObjectStore) -> int | None:
        try:
            return obstore.head(raw, key)["size"]
        except FileNotFoundError as error:
            if is_no_bucket(error):
                raise
            return None

    return store.ask(key, size)


def _ranges(store: Bucket, key: str, size: int, pool: ThreadPoolExecutor) -> Iterator[memoryview]:
    """The chunks of an object in order, a few of them on their way."""
    starts: Iterable[int] = range(0, size, CHUNK_BYTES)
    waiting: deque[Future[memoryview]] = deque()
    for start in starts:
        waiting.append(pool.submit(store.get_range, key, start, min(size, start + CHUNK_BYTES)))
        if len(waiting) >= _AT_ONCE:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()
