"""Whether a job's workers do nothing any more, as far as their nodes tell: a pure function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

from gpuctl.cluster.records.jobs import JobSpec
from gpuctl.cluster.records.nodes import NodeRecord
from gpuctl.cluster.records.rounds import Round

STALLED = "stalled"
"""Reason of a drain that ends the job as failed: a last checkpoint, if there is somebody who can still write it."""
_NAMED = 4
"""Ranks that a message names."""


def stall_reason(job: JobSpec, current: Round, alive: Mapping[str, NodeRecord], completed: AbstractSet[str]) -> str:
    """Why a job whose workers do nothing any more is ended; empty if it is not.

    Args:
        job: with its ``--exit-timeout``.
        current: its round, which runs.
        alive: records of the nodes that live, those of ``current`` that have not completed among them.
        completed: names of the nodes whose workers have all ended well.
    """
    left: list[str] = []
    stalled, still = True, True
    first = 0
    for member in current.members:
        if member.node not in completed:
            record = alive[member.node]
            here = tuple(range(member.nproc)) if record.ranks_left is None else record.ranks_left
            left += [f"rank {first + rank} on {member.node}" for rank in here]
            stalled = stalled and (record.stalled or not here)
            still = still and (record.still_s >= job.exit_timeout_s or not here)
        first += member.nproc
    if not left:
        return ""
    if len(left) < first and still and job.exit_timeout_s:
        done = f"{first - len(left)} of {first} ranks have ended"
        idle = f"{_few(left)} did nothing for {job.exit_timeout_s:g} s (--exit-timeout)"
        return f"{STALLED}: {done}, and {idle}; stacks are in the logs"
    return _without_a_step(current, alive) if stalled else ""


def _without_a_step(current: Round, alive: Mapping[str, NodeRecord]) -> str:
    records = [alive[m.node] for m in current.members if m.node in alive]
    told = [record.progress.step for record in records if record.progress]
    where = f" at step {max(told)}" if told else ""
    return f"{STALLED}{where}: no step, and neither GPUs nor CPUs at work, for longer than --stall-minutes"


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
