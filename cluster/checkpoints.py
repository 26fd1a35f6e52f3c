"""A job's committed checkpoints from outside of the job, without torch: list them, fetch them, delete them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from gpuctl.cluster import layout
from gpuctl.cluster.bucket import Bucket, Store
from gpuctl.cluster.errors import BadInput, CorruptRecord, StoreUnavailable
from gpuctl.cluster.ledger import Ledger
from gpuctl.cluster.records import CheckpointEntry, CheckpointLog

_CHUNK_BYTES = 8 * 1024 * 1024
_THREADS = 4
_TRIES = 20


def ledger(store: Store, job: str) -> Ledger[CheckpointLog]:
    return Ledger(store, f"{layout.checkpoints(job)}/ledger", CheckpointLog)


def committed(store: Store, job: str) -> tuple[CheckpointEntry, ...]:
    """Oldest first."""
    log = ledger(store, job).read().value
    return log.entries if log else ()


def pull(
    store: Bucket, job: str, entry: CheckpointEntry, folder: Path, on_bytes: Callable[[int], None] = lambda _: None
) -> None:
    """Fetch the files of ``entry`` into ``folder``. A file appears there once its digest is right.

    ``on_bytes`` is called from several threads. Raises ``CorruptRecord`` for a file that is missing or damaged,
    ``BadInput`` if ``folder`` cannot be written.
    """
    prefix = f"{layout.checkpoints(job)}/{entry.path}"
    sizes = {item.key.removeprefix(f"{prefix}/"): item.size for item in store.list(prefix)}

    def fetch(name: str) -> None:
        if name not in sizes or ".." in Path(name).parts:
            raise CorruptRecord(f"{name} of step {entry.step} is missing", "take the checkpoint before it")
        _fetch(store, f"{prefix}/{name}", sizes[name], entry.sha256[name], folder / name, on_bytes)

    try:
        folder.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(fetch, sorted(entry.sha256)))
    except OSError as error:
        raise BadInput(f"cannot write to {folder}: {error.strerror}", "choose another folder") from error


def remove(store: Store, job: str, entries: Sequence[CheckpointEntry]) -> None:
    """Commit a log without them first, then delete their files: nobody restores what is being deleted."""
    log = ledger(store, job)
    paths = {entry.path for entry in entries}
    for _ in range(_TRIES):
        version = log.read()
        value = version.value or CheckpointLog()
        kept = tuple(entry for entry in value.entries if entry.path not in paths)
        if len(kept) == len(value.entries) or log.commit(msgspec.structs.replace(value, entries=kept), version.number):
            break
    else:
        raise StoreUnavailable(f"job {job} kept committing checkpoints meanwhile", "try again")
    for path in sorted(paths):
        store.delete([item.key for item in store.list(f"{layout.checkpoints(job)}/{path}")])


def _fetch(store: Bucket, key: str, size: int, digest: str, path: Path, on_bytes: Callable[[int], None]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    hashing = hashlib.sha256()
    try:
        with partial.open("wb") as file:
            for start in range(0, size, _CHUNK_BYTES):
                chunk = store.get_range(key, start, min(size, start + _CHUNK_BYTES))
                hashing.update(chunk)
                file.write(chunk)
                on_bytes(len(chunk))
        if hashing.hexdigest() != digest:
            raise CorruptRecord(f"{key} is damaged: its SHA-256 is another one", "take the checkpoint before it")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
