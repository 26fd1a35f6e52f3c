"""The state of a cluster as plain data, read from its bucket by anybody who may read it.

What a node is, rank 0 knows best: its heartbeat says how it sees each of the others. Only where rank 0 itself has gone
quiet do the heartbeats' ages count, by the store's clock and this machine's, which is good enough for a person.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec

from gpuctl.cluster import checkpoints, jobs, layout
from gpuctl.cluster.bucket import Bucket
from gpuctl.cluster.errors import CorruptRecord
from gpuctl.cluster.ledger import Ledger, Version
from gpuctl.cluster.listing import read_folder
from gpuctl.cluster.records import (
    CheckpointEntry,
    ClusterSpec,
    JobSpec,
    NodeRecord,
    Notice,
    Rank0,
    Round,
    decode,
)

T = TypeVar("T")

_QUIET_S = 10.0
"""Seconds past the lease after which even rank 0 counts as silent: the clocks compared may be a little apart."""
_LAST_JOBS = 20


class NodeState(msgspec.Struct, frozen=True, kw_only=True):
    node: str
    state: str
    """``live``, ``new`` (no second heartbeat yet), ``leaving`` (notice given), ``lost``, or ``silent`` (rank 0 is
    quiet, and so is this one)."""
    address: str
    slots: int
    devices: tuple[str, ...]
    ready: bool
    health: str
    """``ok``, what is wrong with it, or ``stalled``: a job is there, and does nothing."""
    seen_at: float
    risk: str = ""
    """Why the cloud may take it sooner than others, as far as the cloud has said."""
    notice: Notice | None = None
    doing: str = ""
    """What keeps it from being ready, such as "pulling debian:12"."""
    job: str | None = None
    """The unfinished job it takes part in, its round, and its rank among the nodes there."""
    round: int | None = None
    rank: int | None = None
    step: int | None = None
    loss: float | None = None
    steps_per_s: float | None = None


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


class ClusterState(msgspec.Struct, frozen=True, kw_only=True):
    cluster: str
    provider: str
    bucket: str
    nodes_min: int
    nodes_max: int
    rank0: str | None
    """Node that holds the lease."""
    epoch: int
    nodes: tuple[NodeState, ...]
    jobs: tuple[JobState, ...]
    """Those that are not over, and the newest."""


class Heartbeat(msgspec.Struct, frozen=True):
    record: NodeRecord
    seen_at: float
    """When the store last got it, by the store's clock."""


def read_heartbeats(store: Bucket) -> list[Heartbeat]:
    """Of all nodes, by name. One written by another version of gpuctl is passed over."""
    found = [Heartbeat(record, entry.modified) for entry, record in read_folder(store, layout.NODES, NodeRecord)]
    return sorted(found, key=lambda beat: (len(beat.record.node), beat.record.node))


def read_cluster(store: Bucket, url: str) -> ClusterState:
    """Raises ``BadInput`` where there is no cluster. ``url`` is shown as the bucket's."""
    spec = jobs.cluster_spec(store)
    beats = read_heartbeats(store)
    lease = Ledger(store, layout.RANK0, Rank0, keep=16).read()
    leader = next((b for b in beats if lease.value and b.record.node == lease.value.node), None)
    names = _current_jobs(store, leader)
    known = _read_rounds(store, names)
    states = [state for state in _each(lambda name: _job(store, name, beats, known[name]), names) if state]
    unfinished = [state for state in states if state.ended_at is None]
    return ClusterState(
        cluster=spec.name,
        provider=spec.provider,
        bucket=url,
        nodes_min=spec.nodes_min,
        nodes_max=spec.nodes_max,
        rank0=lease.value.node if lease.value else None,
        epoch=lease.number,
        nodes=tuple(_node(beat, leader, spec, known) for beat in beats),
        jobs=tuple(unfinished or states[-1:]),
    )


def read_jobs(store: Bucket, last: int) -> list[JobState]:
    """The ``last`` jobs, oldest first."""
    line = jobs.queue(store)
    names = [version.value for version in line.since(max(0, line.read().number - last)) if version.value]
    beats = read_heartbeats(store)
    found = _each(lambda name: _job(store, name, beats, jobs.rounds(store, name).read()), names)
    return [state for state in found if state]


def unfinished(store: Bucket) -> list[str]:
    """Ids of the jobs that have not ended, in line order."""
    line = jobs.queue(store)
    names = [version.value for version in line.history() if version.value]
    return [name for name, known in _read_rounds(store, names).items() if jobs.outcome_of(known) is None]


# -- one node ---------------------------------------------------------------------------------------------------------


def _node(beat: Heartbeat, leader: Heartbeat | None, spec: ClusterSpec, known: dict[str, Version[Round]]) -> NodeState:
    record = beat.record
    state = NodeState(
        node=record.node,
        state=_state(beat, leader, spec),
        address=record.address,
        slots=record.slots,
        devices=record.devices,
        ready=record.ready,
        health="stalled" if record.stalled else record.health,
        seen_at=beat.seen_at,
        risk=record.risk,
        notice=record.notice,
        doing=record.doing,
    )
    for job, version in known.items():
        current = version.value
        rank = current.rank_of(record.node, record.incarnation) if current and current.phase != "ended" else None
        if current is None or rank is None:
            continue
        said = record.progress if record.progress and record.progress.job == job else None
        return msgspec.structs.replace(
            state,
            job=job,
            round=current.number,
            rank=rank,
            step=said.step if said else None,
            loss=said.loss if said else None,
            steps_per_s=said.steps_per_s if said else None,
        )
    return state


def _state(beat: Heartbeat, leader: Heartbeat | None, spec: ClusterSpec) -> str:
    if leader is not None and not _is_quiet(leader, spec):
        return leader.record.view.get(beat.record.node, "new")
    return "silent" if _is_quiet(beat, spec) else "leaving" if beat.record.notice else "live"


def _is_quiet(beat: Heartbeat, spec: ClusterSpec) -> bool:
    return time.time() - beat.seen_at > spec.lease_s + _QUIET_S


# -- one job ----------------------------------------------------------------------------------------------------------


def _current_jobs(store: Bucket, leader: Heartbeat | None) -> list[str]:
    """Those that rank 0 leads or has not met yet, and the newest, in line order."""
    line = jobs.queue(store)
    newest = line.read()
    start = min(leader.record.line if leader else newest.number - _LAST_JOBS, newest.number - 1)
    later = [version.value for version in line.since(max(0, start)) if version.value]
    led = sorted(leader.record.rounds, key=_place) if leader else []
    return [*(job for job in led if job not in later), *later]


def _place(job: str) -> int:
    digits = job.rpartition("-")[2].rstrip("abcdefgh")
    return int(digits) if digits.isdigit() else 0


def _read_rounds(store: Bucket, names: Sequence[str]) -> dict[str, Version[Round]]:
    return dict(zip(names, _each(lambda name: jobs.rounds(store, name).read(), names), strict=True))


def _job(store: Bucket, name: str, beats: Iterable[Heartbeat], version: Version[Round]) -> JobState | None:
    data = store.get(layout.job_spec(name))
    if data is None:
        return None
    try:
        spec = decode(data, JobSpec, name)
        entries = checkpoints.committed(store, name)
    except CorruptRecord:
        return None
    current, outcome = version.value, jobs.outcome_of(version)
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
    if outcome := jobs.outcome_of(version):
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
        None if jobs.outcome_of(Version(current, 1)) else last.get("steps_per_s"),
    )


def last_metrics(store: Bucket, job: str) -> dict[str, float | None]:
    """The record that the job's rank 0 wrote last; empty if it wrote none."""
    for entry in reversed(store.list(layout.metrics(job))):
        lines = (store.get(entry.key) or b"").splitlines()
        if lines:
            record: dict[str, float | None] = msgspec.json.decode(lines[-1])
            return record
    return {}


def _each(function: Callable[[str], T], names: Sequence[str]) -> list[T]:
    """``function`` of each, several at a time: every one waits for a few requests."""
    if len(names) < 2:
        return [function(name) for name in names]
    with ThreadPoolExecutor(min(len(names), 16)) as pool:
        return list(pool.map(function, names))
