"""What rank 0 decides for one job: a pure function from what it sees to the next entry of the job's ledger.

It tells the two kinds of failure apart. *The world changed* (a member lost, noticed or joined): the next round, free of
charge. *The script failed* (every member alive, a worker's exit code not zero): counted against ``max_restarts``.

A stop that was announced goes through phase ``drain``: the round is still the valid one, so that its last checkpoint
passes the fence; only when all members have reported does the next number begin.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from msgspec.structs import replace

from gpuctl.cluster.records import JobSpec, Member, NodeExit, NodeRecord, Outcome, RankExit, Round


@dataclass(frozen=True, slots=True)
class Policy:
    """Patience, in seconds."""

    settle_s: float = 0.5
    """For further nodes to arrive before a round starts with fewer than it could have, or before it grows."""
    cold_s: float = 15.0
    """For a live node whose interpreter is still warming up, before a round starts without it."""
    blame_s: float = 1.0
    """After a worker's failure, for the other members' exits and for signs of a lost node: who failed first?"""
    unsure_s: float = 8.0
    """The same where a member does not answer. Longer than its lease: a silent node is not the script's fault."""
    drain_s: float = 30.0
    """For a last checkpoint where no cloud sets a deadline (a node joins, the job is cancelled)."""
    margin_s: float = 2.0
    """Of a notice's lead, kept for leaving."""
    late_s: float = 3.0
    """Past a drain's deadline before rank 0 goes on without the missing exits."""


@dataclass(frozen=True, slots=True)
class Sight:
    """What rank 0 sees of one job's surroundings."""

    leader: str
    epoch: int
    alive: Mapping[str, NodeRecord]
    """Nodes whose heartbeat changes, by name."""
    answering: Set[str]
    """Those of them that answered a direct question, or keep a connection open."""
    busy: Set[str]
    """Nodes in rounds of other jobs."""
    exits: Mapping[str, NodeExit]
    """Of the current round, by node."""
    cancelled: bool
    used_ports: Set[tuple[str, int]]
    """(incarnation, port) pairs that earlier rounds have used up, whatever a heartbeat still says."""
    elapsed: Callable[[str], float]
    """Seconds for which the named condition has held without a break, by rank 0's monotonic clock."""
    now: float
    """Wall clock, for the record only."""
    policy: Policy = field(default_factory=Policy)


CANCELLED = "cancelled"
"""Reason of a drain that ends the job: workers that know nothing of draining need not go on until its deadline."""


STALLED = "stalled"
"""Reason of a drain that ends the job as failed: a last checkpoint, if there is somebody who can still write it."""

_STALLED_CODE = 124
"""As of timeout(1)."""


_WAITING = "; waiting for nodes:"


def decide(job: JobSpec, current: Round | None, sight: Sight) -> Round | None:
    """The entry to commit after ``current``, or ``None`` to leave things as they are."""
    if current is None or current.phase == "wait":
        return _decide_waiting(job, current, sight)
    if current.phase == "run":
        return _decide_running(job, current, sight)
    if current.phase == "drain":
        return _decide_draining(job, current, sight)
    return None


def first_failure(exits: Mapping[str, NodeExit]) -> tuple[str, RankExit] | None:
    """(node, how it ended) of the rank to blame.

    A worker that died because a peer's connection broke is a victim, so ranks with another error come first; among
    equals the earliest counts (the clocks are those of the nodes, hence only a hint).
    """
    failed = [(name, rank) for name, node_exit in exits.items() for rank in node_exit.ranks if rank.exit_code != 0]
    return min(failed, key=lambda pair: (_is_victim(pair[1]), pair[1].at, pair[1].rank), default=None)


_VICTIM_SIGNS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Connection refused",
    "NCCL communicator was aborted",
    "ncclRemoteError",
    "Timed out waiting",
    "application timeout",
    "TCPStore",
    "DistNetworkError",
    "DistStoreError",
)


def _is_victim(rank: RankExit) -> bool:
    text = rank.message + rank.traceback
    # SIGTERM is how torchrun ends the others after the first failure.
    return rank.exit_code == 128 + 15 or any(sign in text for sign in _VICTIM_SIGNS)


def _decide_waiting(job: JobSpec, current: Round | None, sight: Sight) -> Round | None:
    if sight.cancelled:
        return _end(job, current, sight, Outcome(result="cancelled", exit_code=130, message="cancelled before it ran"))
    candidates = _candidates(sight)
    warm = [record for record in candidates if record.ready]
    if len(warm) < job.nodes_max and len(candidates) > len(warm) and sight.elapsed("cold") < sight.policy.cold_s:
        # Somebody is about to be ready: a round without it would be stopped in a moment to let it in.
        usable = candidates if len(candidates) >= job.nodes_max else []
    else:
        usable = warm if len(warm) >= job.nodes_min else candidates
    if len(usable) < job.nodes_min:
        return None
    if len(usable) < job.nodes_max and sight.elapsed("enough") < sight.policy.settle_s:
        return None
    waited = current is not None and current.number > 0
    cause = current.reason.partition(_WAITING)[0] if current else ""
    reason = f"enough nodes again after: {cause}" if waited else "job starts"
    return _form(job, current, sight, usable, reason)


def _decide_running(job: JobSpec, current: Round, sight: Sight) -> Round | None:
    lost = [m.node for m in current.members if not _is_alive(m, sight) and not _has_ended_well(m, sight)]
    if not lost and _all_exits(current, sight, {"completed"}):
        return _end(job, current, sight, Outcome(result="succeeded", exit_code=0))
    if lost:
        if sight.cancelled:
            return _cancel(job, current, sight)
        return _form(job, current, sight, _usable_now(job, current, sight), f"{_names(lost)} lost")
    statuses = {e.status for e in sight.exits.values()}
    if "failed" in statuses and "stopped" not in statuses:
        return _blame(job, current, sight)
    if stopped := [name for name, e in sight.exits.items() if e.status not in ("completed", "failed")]:
        if len(sight.exits) < len(current.members) and sight.elapsed("stopped") < sight.policy.blame_s:
            return None  # the others may be about to write the same checkpoint, or to tell of a failure
        return _form(job, current, sight, _usable_now(job, current, sight), f"{_names(stopped)} stopped")
    if sight.cancelled:
        return _drain(current, sight, CANCELLED, sight.policy.drain_s)
    if sight.exits:
        return None  # some have completed, so the others are about to: too late to interrupt them
    if all(sight.alive[m.node].stalled for m in current.members):
        return _drain(current, sight, _stall_words(current, sight), sight.policy.drain_s)
    leaving = {m.node: notice for m in current.members if (notice := sight.alive[m.node].notice)}
    if leaving:
        lead = max(0.0, min(notice.lead_s for notice in leaving.values()) - sight.policy.margin_s)
        return _drain(current, sight, f"{_names(leaving)} given notice", lead)
    joiners = [r.node for r in _candidates(sight) if r.ready and r.node not in {m.node for m in current.members}]
    room = job.nodes_max - len(current.members)
    if joiners and room > 0 and all(sight.alive[m.node].drainable for m in current.members):
        if sight.elapsed("join") < sight.policy.settle_s:
            return None
        return _drain(current, sight, f"{_names(joiners[:room])} joined", sight.policy.drain_s)
    return None


def _decide_draining(job: JobSpec, current: Round, sight: Sight) -> Round | None:
    missing = [m for m in current.members if m.node not in sight.exits]
    lost = [m.node for m in missing if not _is_alive(m, sight)]
    overdue = sight.elapsed("drain") > current.drain_s + sight.policy.late_s
    if missing and not lost and not overdue:
        return None
    if not missing and _all_exits(current, sight, {"completed"}):
        return _end(job, current, sight, Outcome(result="succeeded", exit_code=0))
    if sight.cancelled:
        return _cancel(job, current, sight)
    if current.reason.startswith(STALLED):
        return _end(job, current, sight, Outcome(result="failed", exit_code=_STALLED_CODE, message=current.reason))
    reason = f"{current.reason}{_time_left(sight.exits)}" + (f"; {_names(lost)} lost" if lost else "")
    return _form(job, current, sight, _usable_now(job, current, sight), reason)


def _blame(job: JobSpec, current: Round, sight: Sight) -> Round | None:
    """A worker failed and nobody is known to be lost: the script's fault, unless a lost node shows itself in time."""
    missing = [m.node for m in current.members if m.node not in sight.exits]
    unsure = any(node not in sight.answering for node in missing)
    patience = sight.policy.unsure_s if unsure else sight.policy.blame_s
    if missing and sight.elapsed("failed") < patience:
        return None
    blamed = first_failure(sight.exits)
    if blamed is None:
        rank = RankExit(rank=-1, local_rank=-1, exit_code=1, message="the launcher failed")
        node = next(name for name, e in sight.exits.items() if e.status == "failed")
    else:
        node, rank = blamed
    failures = current.failures + 1
    what = f"rank {rank.rank} on {node} exited with code {rank.exit_code}" + (
        f": {rank.message}" if rank.message else ""
    )
    if failures > job.max_restarts:
        outcome = Outcome(result="failed", exit_code=rank.exit_code, message=what, traceback=rank.traceback)
        return replace(_end(job, current, sight, outcome), failures=failures)
    if sight.cancelled:
        return _cancel(job, current, sight)
    why = f"restart {failures} of {job.max_restarts}: {what}"
    formed = _form(job, current, sight, _usable_now(job, current, sight), why)
    return replace(formed, failures=failures) if formed else None


def _form(job: JobSpec, current: Round | None, sight: Sight, usable: Sequence[NodeRecord], reason: str) -> Round | None:
    """The next world: survivors keep their order, rank 0's node goes first, newcomers last.

    ``None`` if the master to be has no port to offer yet (its next heartbeat brings one).
    """
    seats = {m.node: seat for seat, m in enumerate(current.members)} if current else {}
    order = sorted(usable, key=lambda r: (r.node != sight.leader, seats.get(r.node, len(seats)), not r.ready, r.node))
    chosen = order[: job.nodes_max]
    number = current.number + 1 if current else 1
    failures = current.failures if current else 0
    if len(chosen) < job.nodes_min:
        need = f"{reason}{_WAITING} {job.nodes_min - len(chosen)} more"
        return Round(
            job=job.job, number=number, phase="wait", epoch=sight.epoch, reason=need, failures=failures, at=sight.now
        )
    master = chosen[0]
    port = next((p for p in master.spare_ports if (master.incarnation, p) not in sight.used_ports), None)
    if port is None:
        return None
    members = tuple(
        Member(
            node=r.node,
            incarnation=r.incarnation,
            address=r.address,
            nproc=job.nproc or r.slots,
            tier_port=r.tier_port,
        )
        for r in chosen
    )
    return Round(
        job=job.job,
        number=number,
        phase="run",
        epoch=sight.epoch,
        members=members,
        master_address=master.address,
        master_port=port,
        reason=reason,
        failures=failures,
        at=sight.now,
    )


def _drain(current: Round, sight: Sight, reason: str, seconds: float) -> Round:
    return replace(current, phase="drain", epoch=sight.epoch, reason=reason, drain_s=seconds, at=sight.now)


def _stall_words(current: Round, sight: Sight) -> str:
    told = [progress.step for m in current.members if (progress := sight.alive[m.node].progress)]
    where = f" at step {max(told)}" if told else ""
    return f"{STALLED}{where}: no step, and neither GPUs nor CPUs at work, for longer than --stall-minutes"


def _cancel(job: JobSpec, current: Round, sight: Sight) -> Round:
    return _end(job, current, sight, Outcome(result="cancelled", exit_code=130, message="cancelled"))


def _end(job: JobSpec, current: Round | None, sight: Sight, outcome: Outcome) -> Round:
    base = current or Round(job=job.job, number=0, phase="wait", epoch=sight.epoch)
    return replace(base, phase="ended", epoch=sight.epoch, outcome=outcome, at=sight.now)


def _candidates(sight: Sight) -> list[NodeRecord]:
    usable = (r for r in sight.alive.values() if r.notice is None and r.health == "ok" and r.node not in sight.busy)
    return sorted(usable, key=lambda r: r.node)


def _usable_now(job: JobSpec, current: Round, sight: Sight) -> list[NodeRecord]:
    """The candidates without those that would make the members wait for their imports, if that leaves enough."""
    candidates = _candidates(sight)
    prompt = [r for r in candidates if r.ready or current.rank_of(r.node, r.incarnation) is not None]
    return prompt if len(prompt) >= job.nodes_min else candidates


def _is_alive(member: Member, sight: Sight) -> bool:
    record = sight.alive.get(member.node)
    return record is not None and record.incarnation == member.incarnation


def _has_ended_well(member: Member, sight: Sight) -> bool:
    """What a node reported in its last moments of failing is part of its being lost."""
    return member.node in sight.exits and sight.exits[member.node].status != "failed"


def _time_left(exits: Mapping[str, NodeExit]) -> str:
    """What was left of the shortest notice when the last checkpoint was safe."""
    told = [(e.left_s, e.notice.lead_s) for e in exits.values() if e.notice and e.left_s is not None]
    if not told:
        return ""
    left_s, lead_s = min(told)
    return f", {left_s:.1f} of {lead_s:.0f} s left" if left_s > 0 else f", {lead_s:.0f} s were not enough"


def _all_exits(current: Round, sight: Sight, statuses: Set[str]) -> bool:
    return all(m.node in sight.exits and sight.exits[m.node].status in statuses for m in current.members)


def _names(nodes: Sequence[str] | Mapping[str, object]) -> str:
    return ", ".join(nodes)
