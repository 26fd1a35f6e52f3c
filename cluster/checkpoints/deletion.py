"""Deleting committed checkpoints, and what rounds that are over have left, by the rules of ``commit_log``."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from msgspec.structs import replace

from gpuctl.cluster.agreement import ledgers
from gpuctl.cluster.checkpoints import commit_log
from gpuctl.cluster.checkpoints.listing import committed, folder
from gpuctl.cluster.checkpoints.manifest import read_manifest
from gpuctl.cluster.checkpoints.retention import Retention
from gpuctl.cluster.errors import BadInput, Damaged
from gpuctl.cluster.jobs import queue
from gpuctl.cluster.records.checkpoints import CheckpointEntry, CheckpointIndex
from gpuctl.cluster.storage.bucket import Bucket
from gpuctl.cluster.storage.interface import Entry


@dataclass(frozen=True, slots=True)
class Garbage:
    """Objects that may be deleted."""

    dropped: tuple[CheckpointEntry, ...] = ()
    """Checkpoints that a retention does not keep."""
    left: tuple[Entry, ...] = ()
    """Objects that rounds which are over have left, of checkpoints that were never committed or are removed."""
    frees: int = 0
    """Bytes, of both. What the remaining checkpoints need as well stays, and does not count."""


def freed(store: Bucket, job: str, chosen: Sequence[CheckpointEntry]) -> int:
    """Bytes that ``remove`` would free. Raises ``Damaged`` if what the others need is not known."""
    place = folder(store, job)
    paths = {entry.path for entry in chosen}
    kept = [entry for entry in committed(store, job) if entry.path not in paths]
    return sum(item.size for item in _own(place, chosen, _needed(place, kept)))


def remove(store: Bucket, job: str, chosen: Sequence[CheckpointEntry]) -> int:
    """Delete checkpoints; returns how many bytes became free. Raises ``StoreUnavailable`` and ``Damaged`` as
    ``commit_log.remove`` does."""
    return commit_log.remove(folder(store, job), {entry.path for entry in chosen})


def garbage(store: Bucket, job: str, retention: Retention | None) -> Garbage:
    """What ``retention`` does not keep (``None``: it keeps all), and what dead rounds have left. Once the job has
    ended, all of its rounds are dead.

    Raises ``Damaged`` if what the kept ones need is not known, and ``BadInput`` for a metric that no checkpoint has.
    """
    log = ledgers.checkpoints(store, job).read().value or CheckpointIndex()
    kept = retention.kept(log.entries) if retention else log.entries
    _check_metric(job, retention, log.entries)
    dropped = tuple(entry for entry in log.entries if entry not in kept)
    place = folder(store, job)
    needed = _needed(place, kept)
    own = {item.key: item for item in _own(place, dropped, needed)}
    left = [item for item in commit_log.orphans(place, needed, _fence(store, job, log)) if item.key not in own]
    return Garbage(dropped, tuple(left), sum(item.size for item in (*own.values(), *left)))


def collect(store: Bucket, job: str, found: Garbage) -> int:
    """Delete it; returns how many bytes became free. What is left over is determined anew, by the log as it is then.

    Safe while the job runs: a checkpoint goes from the log before its parts go, and a commit that builds on one which
    has left the log is refused, after which the job writes it whole (see ``commit_log``). Of the running round nothing
    counts as left over: it may be about to commit it. A job that has ended gets its fence raised first, so that nothing
    of it commits any more.
    """
    place = folder(store, job)
    removed = remove(store, job, found.dropped) if found.dropped else 0
    if not found.left:
        return removed
    log = _raise_fence(store, job)
    left = commit_log.orphans(place, _needed(place, log.entries), log.fence)
    place.delete([item.key for item in left])
    return removed + sum(item.size for item in left)


def _own(place: Bucket, chosen: Sequence[CheckpointEntry], needed: set[str]) -> list[Entry]:
    """The objects that ``chosen`` consist of and that are not ``needed``."""
    if not chosen:
        return []
    keys: set[str] = set()
    for entry in chosen:
        with suppress(Damaged):  # what is in its folder goes
            keys |= read_manifest(place, entry).keys()
    folders = tuple(f"{entry.path}/" for entry in chosen)
    return [
        item for item in place.list("") if (item.key in keys or item.key.startswith(folders)) and item.key not in needed
    ]


def _needed(place: Bucket, kept: Sequence[CheckpointEntry]) -> set[str]:
    needed: set[str] = set()
    for entry in kept:
        try:
            needed |= commit_log.needed_by(place, [entry])
        except Damaged as damaged:
            raise Damaged(
                f"cannot tell what the checkpoint of step {entry.step} needs: {damaged.message}",
                f"delete it first: gpuctl ckpt rm {entry.step}",
            ) from damaged
    return needed


def _check_metric(job: str, retention: Retention | None, entries: Sequence[CheckpointEntry]) -> None:
    if retention is None or retention.best is None or not entries:
        return
    told = sorted({name for entry in entries for name in entry.metrics})
    if retention.best not in told:
        raise BadInput(
            f"no checkpoint of job {job} has a metric {retention.best!r}", f"they have: {', '.join(told) or 'none'}"
        )


def _fence(store: Bucket, job: str, log: CheckpointIndex) -> int:
    """Rounds below it are over for good."""
    current = ledgers.rounds(store, job).read()
    if queue.outcome_of(current) is None or current.value is None:
        return log.fence
    return max(log.fence, current.value.number + 1)


def _raise_fence(store: Bucket, job: str) -> CheckpointIndex:
    def raised(log: CheckpointIndex | None) -> CheckpointIndex | None:
        log = log or CheckpointIndex()
        fence = _fence(store, job, log)
        return None if fence == log.fence else replace(log, fence=fence)

    log, changed = ledgers.checkpoints(store, job).update(raised, f"job {job} kept committing checkpoints meanwhile")
    return changed or log or CheckpointIndex()
