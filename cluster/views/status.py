"""The state of a cluster as plain data, read from its bucket by anybody who may read it.

What a node is, rank 0 knows best: its heartbeat says how it sees each of the others. Only where rank 0 itself has gone
quiet do the heartbeats' ages count, by the store's clock and this machine's, which is good enough for a person.
"""

from __future__ import annotations

import time

import msgspec

from gpuctl.cluster.agreement import ledgers
from gpuctl.cluster.agreement.ledger import Version
from gpuctl.cluster.concurrency import collect
from gpuctl.cluster.disk import full_bucket
from gpuctl.cluster.jobs import queue
from gpuctl.cluster.records.clusters import ClusterSpec
from gpuctl.cluster.records.nodes import PreemptionNotice
from gpuctl.cluster.records.rounds import Round
from gpuctl.cluster.storage.bucket import Bucket
from gpuctl.cluster.views.job_status import (
    _AT_ONCE,
    _LAST_JOBS,
    Heartbeat,
    JobState,
    _is_quiet,
    _job,
    _place,
    _read_rounds,
    read_heartbeats,
)


class NodeState(msgspec.Struct, frozen=True, kw_only=True):
    node: str
    state: str
    """``live``, ``new`` (one old heartbeat), ``leaving`` (notice given), ``lost``, ``silent`` (rank 0 is quiet, and so
    is this one), or ``ended`` (it was a process of this machine, and is none any more)."""
    address: str
    slots: int
    devices: tuple[str, ...]
    ready: bool
    health: str
    """``ok``, what is wrong with its GPUs, or ``stalled``: a job is there, and does nothing."""
    seen_at: float
    risk: str = ""
    """Why the cloud may take it sooner than others, as far as the cloud has said."""
    notice: PreemptionNotice | None = None
    doing: str = ""
    """What keeps it from being ready, such as "pulling debian:12"."""
    trouble: str = ""
    """What is wrong there, such as a full disk."""
    job: str | None = None
    """The unfinished job it takes part in, its round, and its rank among the nodes there."""
    round: int | None = None
    rank: int | None = None
    step: int | None = None
    loss: float | None = None
    steps_per_s: float | None = None


class ClusterState(msgspec.Struct, frozen=True, kw_only=True):
    cluster: str
    provider: str
    bucket: str
    nodes_min: int
    nodes_max: int
    rank0: str | None
    """Node that holds the lease, unless that has ended."""
    epoch: int
    nodes: tuple[NodeState, ...]
    jobs: tuple[JobState, ...]
    """Those that are not over, and the newest."""
    trouble: str = ""
    """What is wrong with the bucket, such as a full disk, or with the nodes of this machine."""


def read_cluster(store: Bucket, url: str) -> ClusterState:
    """Raises ``BadInput`` where there is no cluster. ``url`` is shown as the bucket's."""
    spec = queue.cluster_spec(store)
    beats = read_heartbeats(store)
    lease = ledgers.lease(store).read()
    leader = next((b for b in beats if lease.value and b.record.node == lease.value.node), None)
    names = _current_jobs(store, leader)
    known = _read_rounds(store, names)
    states = [state for state in collect(lambda name: _job(store, name, beats, known[name]), names, _AT_ONCE) if state]
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
        trouble=full_bucket(store),
    )


def _node(beat: Heartbeat, leader: Heartbeat | None, spec: ClusterSpec, known: dict[str, Version[Round]]) -> NodeState:
    record = beat.record
    state = NodeState(
        node=record.node,
        state=_state(beat, leader, spec),
        address=record.address,
        slots=record.slots,
        devices=record.devices,
        ready=record.ready,
        health="stalled" if record.stalled and record.health == "ok" else record.health,
        seen_at=beat.seen_at,
        risk=record.risk,
        notice=record.notice,
        doing=record.doing,
        trouble=record.trouble,
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
        seen = leader.record.view.get(beat.record.node, "new")
        # Rank 0 counts on a node from the second heartbeat on: it does not trust clocks. People may after `up`.
        if seen != "new" or beat.record.beat == 0 or time.time() - beat.seen_at > spec.lease_s:
            return seen
        return "leaving" if beat.record.notice else "live"
    return "silent" if _is_quiet(beat, spec) else "leaving" if beat.record.notice else "live"


def _current_jobs(store: Bucket, leader: Heartbeat | None) -> list[str]:
    """Those that rank 0 leads or has not met yet, and the newest, in line order."""
    line = ledgers.queue(store)
    newest = line.read()
    start = min(leader.record.line if leader else newest.number - _LAST_JOBS, newest.number - 1)
    later = [version.value for version in line.since(max(0, start)) if version.value]
    led = sorted(leader.record.rounds, key=_place) if leader else []
    return [*(job for job in led if job not in later), *later]
