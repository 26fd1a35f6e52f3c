"""A job's committed checkpoints, seen from outside of the job and without torch."""

from __future__ import annotations

from collections.abc import Sequence

from gpuctl.cluster import layout
from gpuctl.cluster.agreement import ledgers
from gpuctl.cluster.errors import BadInput
from gpuctl.cluster.jobs import queue
from gpuctl.cluster.records.checkpoints import CheckpointEntry
from gpuctl.cluster.storage.bucket import Bucket
from gpuctl.cluster.storage.interface import Store


def folder(store: Bucket, job: str) -> Bucket:
    """The job's checkpoint folder, as ``commit_log`` and ``manifest`` want to see it."""
    return store.at(layout.checkpoints(job))


def committed(store: Store, job: str) -> tuple[CheckpointEntry, ...]:
    """Committed checkpoints, oldest first."""
    log = ledgers.checkpoints(store, job).read().value
    return log.entries if log else ()


def find(store: Store, job: str, step: str) -> CheckpointEntry:
    """The committed checkpoint of a step, or the ``last`` one. Raises ``BadInput`` naming those that there are."""
    entries = committed(store, job)
    if step == "last" and entries:
        return entries[-1]
    for entry in entries:
        if str(entry.step) == step:
            return entry
    steps = ", ".join(str(entry.step) for entry in entries)
    raise BadInput(f"job {job} has no checkpoint of step {step}", f"it has: {steps or 'none'}")


def copies(store: Store, job: str, entries: Sequence[CheckpointEntry]) -> dict[str, tuple[str, ...]]:
    """The nodes that hold replicas, by checkpoint path: the nodes of the job's present round with copies on their disks
    (see ``replica_layout``). Nodes keep the last one alone, and once the job is over none."""
    if not entries or not entries[-1].nodes:
        return {}
    last = entries[-1]
    current = ledgers.rounds(store, job).read()
    if current.value is None or queue.outcome_of(current) is not None:
        return {}
    near = tuple(member.node for member in current.value.members if member.node in last.nodes)
    return {last.path: near} if near else {}
