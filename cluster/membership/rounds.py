"""What rank 0 decides for one job: a pure function from what it sees to the next entry of the job's ledger.

It tells the two kinds of failure apart. *The world changed* (a member lost, noticed or joined): the next round, free of
charge, and so with a member that is ill. *The script failed* (every member alive and well, a worker's exit code not
zero): counted against ``max_restarts``.

A stop that was announced goes through phase ``drain``: the round is still the valid one, so that its last checkpoint
passes the fence; only when all members have reported does the next number begin.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from msgspec.structs import replace

from gpuctl.cluster.membership.blame import first_failure
from gpuctl.cluster.membership.rank_order import in_rank_order, members_of, rank_clash
from gpuctl.cluster.membership.stalls import STALLED, stall_reason
from gpuctl.cluster.records.jobs import JobSpec
from gpuctl.cluster.records.nodes import NodeRecord
from gpuctl.cluster.records.rounds import JobOutcome, Member, NodeExit, RankExit, Round


@dataclass(frozen=True, slots=True)
class RoundPolicy:
    """How long rank 0 waits for what, in seconds."""

    gather_s: float = 0.5
    """For further nodes to arrive before a round starts with fewer than it could have."""
    settle_s: float = 0.5
    """The same before a round that runs is stopped to let them in."""
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
class Observation:
    """What rank 0 observes about one job."""

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
    cancelled_now: bool = False
    """Whoever cancelled it wants no last checkpoint."""
    policy: RoundPolicy = field(default_factory=RoundPolicy)


CANCELLED = "cancelled"
"""Reason of a drain that ends the job: workers that know nothing of draining need not go on until its deadline."""
_STALLED_CODE = 124
"""As of timeout(1)."""
_WAITING = "; waiting for nodes:"


def decide(job: JobSpec, current: Round | None, seen: Observation) -> Round | None:
    """The entry to commit after ``current``, or ``None`` to leave things as they are."""
    if current is None or current.phase == "wait":
        return _decide_waiting(job, current, seen)
    if current.phase == "run":
        return _decide_running(job, current, seen)
    if current.phase == "drain":
        return _decide_draining(job, current, seen)
    return None


def _decide_waiting(job: JobSpec, current: Round | None, seen: Observation) -> Round | None:
    if seen.cancelled:
        return _end(
            job, current, seen, JobOutcome(result="cancelled", exit_code=130, message="cancelled before it ran")
        )
    candidates = _candidates(seen)
    warm = [record for record in candidates if record.ready]
    if len(warm) < job.nodes_max and len(candidates) > len(warm) and seen.elapsed("cold") < seen.policy.cold_s:
        # Somebody is about to be ready: a round without it would be stopped in a moment to let it in.
        usable = candidates if len(candidates) >= job.nodes_max else []
    else:
        usable = warm if len(warm) >= job.nodes_min else candidates
    if len(usable) < job.nodes_min:
        return None
    if len(usable) < job.nodes_max and seen.elapsed("enough") < seen.policy.gather_s:
        return None
    if clash := rank_clash(usable):  # one of them may be an earlier life, which is about to be missed
        if seen.elapsed("clash") < seen.policy.unsure_s:
            return None
        return _end(job, current, seen, JobOutcome(result="failed", exit_code=2, message=clash))
    waited = current is not None and current.number > 0
    cause = current.reason.partition(_WAITING)[0] if current else ""
    reason = f"enough nodes again after: {cause}" if waited else "job starts"
    return _form(job, current, seen, usable, reason)


def _decide_running(job: JobSpec, current: Round, seen: Observation) -> Round | None:
    lost = [m.node for m in current.members if not _is_alive(m, seen) and not _has_ended_well(m, seen)]
    if not lost and _all_exits(current, seen, {"completed"}):
        return _end(job, current, seen, JobOutcome(result="succeeded", exit_code=0))
    if seen.cancelled_now:
        return _cancel(job, current, seen)
    statuses = {e.status for e in seen.exits.values()}
    sick = _ill(seen)
    ill = "; ".join(f"{m.node} is ill: {sick[m.node]}" for m in current.members if m.node in sick)
    if changed := f"{_names(lost)} lost" if lost else ill if "failed" in statuses else "":
        if seen.cancelled:
            return _cancel(job, current, seen)
        return _form(job, current, seen, _usable_now(job, current, seen), changed)
    if "failed" in statuses and "stopped" not in statuses:
        return _blame(job, current, seen)
    if stopped := [name for name, e in seen.exits.items() if e.status not in ("completed", "failed")]:
        if len(seen.exits) < len(current.members) and seen.elapsed("stopped") < seen.policy.blame_s:
            return None  # the others may be about to write the same checkpoint, or to tell of a failure
        why = next((f": {r.message}" for name in stopped for r in seen.exits[name].ranks if r.message), "")
        return _form(job, current, seen, _usable_now(job, current, seen), f"{_names(stopped)} stopped{why}")
    if seen.cancelled:
        return _drain(current, seen, CANCELLED, seen.policy.drain_s)
    if reason := stall_reason(job, current, seen.alive, seen.exits.keys()):  # who has exited by now has completed
        return _drain(current, seen, reason, seen.policy.drain_s)
    if seen.exits:
        return None  # some have completed, so the others are about to: too late to interrupt them
    if ill:
        return _drain(current, seen, ill, seen.policy.drain_s)
    leaving = {m.node: notice for m in current.members if (notice := seen.alive[m.node].notice)}
    if leaving:
        lead = max(0.0, min(notice.lead_s for notice in leaving.values()) - seen.policy.margin_s)
        return _drain(current, seen, f"{_names(leaving)} given notice", lead)
    joiners = [r.node for r in _candidates(seen) if r.ready and r.node not in {m.node for m in current.members}]
    room = job.nodes_max - len(current.members)
    if joiners and room > 0 and all(seen.alive[m.node].drainable for m in current.members):
        if seen.elapsed("join") < seen.policy.settle_s:
            return None
        return _drain(current, seen, f"{_names(joiners[:room])} joined", seen.policy.drain_s)
    return None


def _decide_draining(job: JobSpec, current: Round, seen: Observation) -> Round | None:
    missing = [m for m in current.members if m.node not in seen.exits]
    lost = [m.node for m in missing if not _is_alive(m, seen)]
    overdue = seen.elapsed("drain") > current.drain_s + seen.policy.late_s
    if missing and not lost and not overdue and not seen.cancelled_now:
        return None
    if not missing and _all_exits(current, seen, {"completed"}):
        return _end(job, current, seen, JobOutcome(result="succeeded", exit_code=0))
    if seen.cancelled:
        return _cancel(job, current, seen)
    if current.reason.startswith(STALLED):
        return _end(job, current, seen, JobOutcome(result="failed", exit_code=_STALLED_CODE, message=current.reason))
    reason = f"{current.reason}{_time_left(seen.exits)}" + (f"; {_names(lost)} lost" if lost else "")
    return _form(job, current, seen, _usable_now(job, current, seen), reason)


def _blame(job: JobSpec, current: Round, seen: Observation) -> Round | None:
    """A worker failed and nobody is known to be lost: the script's fault, unless a lost node shows itself in time."""
    missing = [m.node for m in current.members if m.node not in seen.exits]
    unsure = any(node not in seen.answering for node in missing)
    patience = seen.policy.unsure_s if unsure else seen.policy.blame_s
    if missing and seen.elapsed("failed") < patience:
        return None
    blamed = first_failure(seen.exits)
    if blamed is None:
        rank = RankExit(rank=-1, local_rank=-1, exit_code=1, message="the launcher failed")
        node = next(name for name, e in seen.exits.items() if e.status == "failed")
    else:
        node, rank = blamed
    failures = current.failures + 1
    how = f"was killed by {rank.signal}" if rank.signal else f"exited with code {rank.exit_code}"
    what = f"rank {rank.rank} on {node} {how}" + (f": {rank.message}" if rank.message else "")
    if failures > job.max_restarts:
        outcome = JobOutcome(
            result="failed",
            exit_code=rank.exit_code,
            message=what,
            traceback=rank.traceback,
            hint="" if job.max_restarts else "--max-restarts N would have started it again",
        )
        return replace(_end(job, current, seen, outcome), failures=failures)
    if seen.cancelled:
        return _cancel(job, current, seen)
    why = f"restart {failures} of {job.max_restarts}: {what}"
    formed = _form(job, current, seen, _usable_now(job, current, seen), why)
    return replace(formed, failures=failures) if formed else None


def _form(
    job: JobSpec, current: Round | None, seen: Observation, usable: Sequence[NodeRecord], reason: str
) -> Round | None:
    """The next world: survivors keep their order, rank 0's node goes first, newcomers last.

    ``None`` if the master to be has no port to offer yet (its next heartbeat brings one).
    """
    seats = {m.node: seat for seat, m in enumerate(current.members)} if current else {}
    order = sorted(usable, key=lambda r: (r.node != seen.leader, seats.get(r.node, len(seats)), not r.ready, r.node))
    chosen = in_rank_order(order, job.nodes_max)
    number = current.number + 1 if current else 1
    failures = current.failures if current else 0
    if len(chosen) < job.nodes_min:
        need = f"{reason}{_WAITING} {job.nodes_min - len(chosen)} more"
        return Round(
            job=job.job, number=number, phase="wait", epoch=seen.epoch, reason=need, failures=failures, at=seen.now
        )
    master = chosen[0]
    spare = next((p for p in master.spare_ports if (master.incarnation, p) not in seen.used_ports), None)
    port = master.master_port or spare
    if port is None:
        return None
    return Round(
        job=job.job,
        number=number,
        phase="run",
        epoch=seen.epoch,
        members=members_of(chosen, job.nproc),
        master_address=master.address,
        master_port=port,
        reason=reason,
        failures=failures,
        at=seen.now,
    )


def _drain(current: Round, seen: Observation, reason: str, seconds: float) -> Round:
    return replace(current, phase="drain", epoch=seen.epoch, reason=reason, drain_s=seconds, at=seen.now)


def _cancel(job: JobSpec, current: Round, seen: Observation) -> Round:
    return _end(job, current, seen, JobOutcome(result="cancelled", exit_code=130, message="cancelled"))


def _end(job: JobSpec, current: Round | None, seen: Observation, outcome: JobOutcome) -> Round:
    base = current or Round(job=job.job, number=0, phase="wait", epoch=seen.epoch)
    return replace(base, phase="ended", epoch=seen.epoch, outcome=outcome, at=seen.now)


def _ill(seen: Observation) -> dict[str, str]:
    """What is wrong with the nodes that no round may use; an exit may tell it before a heartbeat does."""
    told = {node: record.health for node, record in seen.alive.items() if record.health != "ok"}
    return told | {node: exit_.ill for node, exit_ in seen.exits.items() if exit_.ill}


def _candidates(seen: Observation) -> list[NodeRecord]:
    unfit = seen.busy | _ill(seen).keys()
    usable = (r for r in seen.alive.values() if r.notice is None and r.node not in unfit)
    return sorted(usable, key=lambda r: r.node)


def _usable_now(job: JobSpec, current: Round, seen: Observation) -> list[NodeRecord]:
    """The candidates without those that would make the members wait for their imports, if that leaves enough."""
    candidates = _candidates(seen)
    prompt = [r for r in candidates if r.ready or current.rank_of(r.node, r.incarnation) is not None]
    return prompt if len(prompt) >= job.nodes_min else candidates


def _is_alive(member: Member, seen: Observation) -> bool:
    record = seen.alive.get(member.node)
    return record is not None and record.incarnation == member.incarnation


def _has_ended_well(member: Member, seen: Observation) -> bool:
    """What a node reported in its last moments of failing is part of its being lost."""
    return member.node in seen.exits and seen.exits[member.node].status != "failed"


def _time_left(exits: Mapping[str, NodeExit]) -> str:
    """What was left of the shortest notice when the last checkpoint was safe."""
    told = [(e.left_s, e.notice.lead_s) for e in exits.values() if e.notice and e.left_s is not None]
    if not told:
        return ""
    left_s, lead_s = min(told)
    return f", {left_s:.1f} of {lead_s:.0f} s left" if left_s > 0 else f", {lead_s:.0f} s were not enough"


def _all_exits(current: Round, seen: Observation, statuses: Set[str]) -> bool:
    return all(m.node in seen.exits and seen.exits[m.node].status in statuses for m in current.members)


def _names(nodes: Sequence[str] | Mapping[str, object]) -> str:
    return ", ".join(nodes)
