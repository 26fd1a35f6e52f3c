"""How far jobs are, read from their ledgers and what their ranks tell."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import msgspec

from gpuctl.cluster import layout
from gpuctl.cluster.agreement import ledgers
from gpuctl.cluster.agreement.ledger import Version
from gpuctl.cluster.checkpoints import listing
from gpuctl.cluster.concurrency import collect
from gpuctl.cluster.errors import CorruptRecord
from gpuctl.cluster.jobs import queue
from gpuctl.cluster.records.checkpoints import CheckpointEntry
from gpuctl.cluster.records.clusters import ClusterSpec
from gpuctl.cluster.records.codec import decode
from gpuctl.cluster.records.jobs import JobSpec
from gpuctl.cluster.records.nodes import NodeRecord
from gpuctl.cluster.records.rounds import Round
from gpuctl.cluster.storage.bucket import Bucket
from gpuctl.cluster.storage.record_io import read_folder

_AT_ONCE = 16
"""Every job costs a few requests, most of them one after the other."""
_QUIET_S = 10.0
"""Seconds past the lease after which even rank 0 counts as silent: the clocks compared may be a little apart."""
_LAST_JOBS = 20


class CheckpointState(msgspec.Struct, frozen=True, kw_only=True):
    step: int
    round: int
    bytes: int
    at: float


class JobState(msgspec.Struct, frozen=True, kw_only=True):
    job: str
    number: int
    state: str
    """``queued``, ``running``, ``draining``, ``waiting`` (for nodes to be back), ``cancelling``; then ``succeeded``,
    ``failed``, ``cancelled``."""
    script: str
    args: tuple[str, ...]
    nodes_min: int
    nodes_max: int
    nodes: int
    """In the current round."""
    round: int | None
    reason: str
    """Of the round; of the end, once the job has ended."""
    failures: int
    max_restarts: int
    exit_code: int | None
    step: int | None
    loss: float | None
    steps_per_s: float | None
    checkpoint: CheckpointState | None
    submitted_at: float
    submitted_by: str
    ended_at: float | None


class Heartbeat(msgspec.Struct, frozen=True):
    record: NodeRecord
    seen_at: float
    """When the store last got it, by the store's clock."""


def read_heartbeats(store: Bucket) -> list[Heartbeat]:
    """All nodes' heartbeats, by name. One written by another version of gpuctl is passed over."""
    found = [Heartbeat(record, entry.modified) for entry, record in read_folder(store, layout.NODES, NodeRecord)]
    return sorted(found, key=lambda beat: (len(beat.record.node), beat.record.node))


def read_jobs(store: Bucket, last: int) -> list[JobState]:
    """The ``last`` jobs, oldest first."""
    line = ledgers.queue(store)
    names = [version.value for version in line.since(max(0, line.read().number - last)) if version.value]
    beats = read_heartbeats(store)
    found = collect(lambda name: _job(store, name, beats, ledgers.rounds(store, name).read()), names, _AT_ONCE)
    return [state for state in found if state]


def unfinished(store: Bucket) -> list[str]:
    """Ids of the jobs that have not ended, in line order."""
    line = ledgers.queue(store)
    names = [version.value for version in line.history() if version.value]
    return [name for name, known in _read_rounds(store, names).items() if queue.outcome_of(known) is None]


def _is_quiet(beat: Heartbeat, spec: ClusterSpec) -> bool:
    return time.time() - beat.seen_at > spec.lease_s + _QUIET_S


def _place(job: str) -> int:
    digits = job.rpartition("-")[2].rstrip("abcdefgh")
    return int(digits) if digits.isdigit() else 0


def _read_rounds(store: Bucket, names: Sequence[str]) -> dict[str, Version[Round]]:
    return dict(zip(names, collect(lambda name: ledgers.rounds(store, name).read(), names, _AT_ONCE), strict=True))


def _job(store: Bucket, name: str, beats: Iterable[Heartbeat], version: Version[Round]) -> JobState | None:
    data = store.get(layout.job_spec(name))
    if data is None:
        return None
    try:
        spec = decode(data, JobSpec, name)
        entries = listing.committed(store, name)
    except CorruptRecord:
        return None
    current, outcome = version.value, queue.outcome_of(version)
    step, loss, rate = _progress(store, name, beats, current)
    return JobState(
        job=name,
        number=spec.number,
        state=_job_state(store, name, version),
        script=spec.script,
        args=spec.args,
        nodes_min=spec.nodes_min,
        nodes_max=spec.nodes_max,
        nodes=len(current.members) if current else 0,
        round=current.number if current else None,
        reason=outcome.message if outcome else current.reason if current else "",
        failures=current.failures if current else 0,
        max_restarts=spec.max_restarts,
        exit_code=outcome.exit_code if outcome else None,
        step=step,
        loss=loss,
        steps_per_s=rate,
        checkpoint=_checkpoint(entries[-1] if entries else None),
        submitted_at=spec.submitted_at,
        submitted_by=spec.submitted_by,
        ended_at=current.at if outcome and current else None,
    )


def _job_state(store: Bucket, name: str, version: Version[Round]) -> str:
    if outcome := queue.outcome_of(version):
        return outcome.result
    if store.get(layout.cancel(name)) is not None:
        return "cancelling"
    current = version.value
    if current is None or current.number == 0:
        return "queued"
    return "running" if current.phase == "run" else "draining" if current.members else "waiting"


def _checkpoint(entry: CheckpointEntry | None) -> CheckpointState | None:
    if entry is None:
        return None
    return CheckpointState(step=entry.step, round=entry.round, bytes=entry.bytes, at=entry.at)


def _progress(
    store: Bucket, name: str, beats: Iterable[Heartbeat], current: Round | None
) -> tuple[int | None, float | None, float | None]:
    """Step, loss and steps/s: from the heartbeats while it runs, from the metrics otherwise."""
    said = [beat.record.progress for beat in beats if beat.record.progress and beat.record.progress.job == name]
    now = [p for p in said if current and current.phase != "ended" and p.round == current.number]
    if now:
        # All nodes work on the same step; the rank that logs says more than the others.
        best = max(now, key=lambda p: (p.loss is not None, p.step))
        return max(p.step for p in now), best.loss, best.steps_per_s
    last = last_metrics(store, name)
    step = last.get("step")
    return (
        int(step) if step is not None else None,
        last.get("loss"),
        None if queue.outcome_of(Version(current, 1)) else last.get("steps_per_s"),
    )


def last_metrics(store: Bucket, job: str) -> dict[str, float | None]:
    """The record that the job's rank 0 wrote last; empty if it wrote none."""
    for entry in reversed(store.list(layout.metrics(job))):
        lines = (store.get(entry.key) or b"").splitlines()
        if lines:
            record: dict[str, float | None] = msgspec.json.decode(lines[-1])
            return record
    return {}
