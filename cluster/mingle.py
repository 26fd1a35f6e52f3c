"""Mingle: how a node meets the others under a job's ID, waits for rank 0, and learns the round it is in.

Call ``tick`` whenever something may have changed and at least once per heartbeat. It is synchronous and owns no
thread, so a test runs a whole cluster in one process under its own clock. All nodes run the same code:

- *rank 0* lists the heartbeats, takes new jobs from the line, and commits what ``rounds.decide`` says. Requests per
  second grow as the number of nodes.
- *the others* read one key, rank 0's heartbeat, which names the newest version of each unfinished job's ledger.

Direct questions (``Evidence``) only make it quick: without any answer the same things happen, a lease later.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, Protocol

from msgspec.structs import replace

from gpuctl.cluster import layout
from gpuctl.cluster.bucket import Store
from gpuctl.cluster.clock import Clock
from gpuctl.cluster.errors import CorruptRecord
from gpuctl.cluster.ledger import Ledger, Version
from gpuctl.cluster.rank0 import Lease
from gpuctl.cluster.records import ClusterSpec, JobSpec, NodeExit, NodeRecord, Outcome, Round, decode
from gpuctl.cluster.rounds import Policy, Sight, decide

Sign = Literal["up", "gone", "silent", "unknown"]


class Evidence(Protocol):
    """What direct contact tells of another agent's life (see ``peers``)."""

    def of(self, node: str, incarnation: str) -> Sign:
        """``up``: it keeps a connection; ``gone``: the connection broke and its port refuses a new one; ``silent``: it
        was up and nothing comes any more; ``unknown``: never met."""
        ...

    def attend(self, records: Iterable[NodeRecord]) -> None:
        """Keep a connection to each of these (rank 0 calls this)."""
        ...


class Mingle:
    """One node's part in the cluster. ``tick`` is for one thread; ``heartbeat`` may be called from another.

    ``tick`` raises ``StoreUnavailable`` with nothing lost: call it again.
    """

    def __init__(
        self,
        store: Store,
        clock: Clock,
        evidence: Evidence,
        spec: ClusterSpec,
        me: Callable[[], NodeRecord],
        policy: Policy | None = None,
    ) -> None:
        self._store = store
        self._clock = clock
        self._evidence = evidence
        self._spec = spec
        self._me = me
        self._policy = policy or Policy(unsure_s=2.5 * spec.lease_s)
        self.lease = Lease(store, clock, lease_s=spec.lease_s)
        self.leads = False
        self.jobs: dict[str, Version[Round]] = {}
        """Every unfinished job known here and the newest entry of its ledger; version 0 while it waits in line."""
        self.line = 0
        self.view: dict[str, str] = {}
        self._specs: dict[str, JobSpec] = {}
        self._ledgers: dict[str, Ledger[Round]] = {}
        self._exits: dict[tuple[str, int], dict[str, NodeExit]] = {}
        self._cancelled: set[str] = set()
        self._used_ports: dict[str, set[tuple[str, int]]] = {}
        self._queue: Ledger[str] = Ledger(store, layout.QUEUE, str, keep=None)
        self._nodes: dict[str, _Seen] = {}
        self._since: dict[str, float] = {}
        self._asked: set[str] = set()
        self._told: dict[str, Any] = {}

    def heartbeat(self, beat: int) -> NodeRecord:
        """This node's record, with what rank 0 tells the others in it."""
        return replace(self._me(), beat=beat, **self._told)

    def tick(self) -> bool:
        """One look and, on rank 0, one decision for each job. ``jobs`` then holds what to obey.

        ``True`` if rank 0 decided something: write a heartbeat, which names it, and then poke the others.
        """
        me = self._me()
        self.lease.refresh()
        if not self.lease.is_held_by(me):
            self.leads = False
            if self._may_lead(me) and self.lease.take(me):
                self._nodes.clear()
        if self.lease.is_held_by(me):
            if not self.leads:
                self._take_over()
            self._observe(me)
            decided = self._lead(me)
        else:
            self._follow()
            decided = False
        versions = {job: version.number for job, version in self.jobs.items()}
        self._told = {"rounds": versions, "line": self.line, "view": dict(self.view)} if self.leads else {}
        return decided

    # -- everybody ----------------------------------------------------------------------------------------------------

    def _may_lead(self, me: NodeRecord) -> bool:
        holder = self.lease.holder
        if holder is None:
            return True
        if holder.node == me.node:
            return True  # an earlier life of this very node, which ended
        if self._evidence.of(holder.node, holder.incarnation) == "gone":
            return True
        record = self.lease.watch()
        if record is not None and record.incarnation != holder.incarnation:
            return True
        return self.lease.has_lapsed()

    def _follow(self) -> None:
        holder = self.lease.holder
        record = self.lease.watch() if holder else None
        if holder is None or record is None or record.incarnation != holder.incarnation:
            return
        self.line = max(self.line, record.line)
        for job in list(self.jobs):
            if job not in record.rounds and record.line >= self.line:
                self._refresh(job)
        for job, version in record.rounds.items():
            known = self.jobs.setdefault(job, Version(None, 0))
            if version > known.number:
                self._refresh(job)
        self._forget_ended()

    def _refresh(self, job: str) -> None:
        newest = self._ledger(job).read()
        if newest.number > self.jobs.get(job, Version(None, -1)).number:
            self.jobs[job] = newest

    def _ledger(self, job: str) -> Ledger[Round]:
        return self._ledgers.setdefault(job, Ledger(self._store, layout.rounds(job), Round, keep=256))

    def _forget_ended(self) -> None:
        for job, version in list(self.jobs.items()):
            if version.value is not None and version.value.phase == "ended":
                del self.jobs[job]
                self._ledgers.pop(job, None)
                self._specs.pop(job, None)
                self._used_ports.pop(job, None)
                self._cancelled.discard(job)
                self._exits = {key: value for key, value in self._exits.items() if key[0] != job}

    # -- rank 0 -------------------------------------------------------------------------------------------------------

    def _take_over(self) -> None:
        """Learn where every unfinished job stands. What the last rank 0 told of the line is not looked up again."""
        for job in list(self.jobs):
            self._refresh(job)
        self._take_new_jobs()
        self._forget_ended()
        self._since.clear()
        self.leads = True

    def _take_new_jobs(self) -> None:
        for version in self._queue.since(self.line):
            if version.value is not None:
                self.jobs.setdefault(version.value, Version(None, 0))
                self._refresh(version.value)
                self._refuse_if_unreadable(version.value)
            self.line = version.number

    def _refuse_if_unreadable(self, job: str) -> None:
        """A job whose spec cannot be read ends at once, or it would hold up the line."""
        try:
            self._spec_of(job)
        except CorruptRecord as error:
            outcome = Outcome(result="failed", exit_code=2, message=str(error))
            ended = Round(job=job, number=0, phase="ended", epoch=self.lease.epoch, outcome=outcome)
            self._ledger(job).commit(ended, self.jobs[job].number)
            self._refresh(job)

    def _observe(self, me: NodeRecord) -> None:
        """List the heartbeats and read those that changed."""
        now = self._clock.monotonic()
        entries = {
            entry.key.removeprefix(f"{layout.NODES}/").removesuffix(".json"): entry
            for entry in self._store.list(layout.NODES)
        }
        changed = [name for name, e in entries.items() if name not in self._nodes or self._nodes[name].tag != e.tag]
        for name, data in zip(changed, self._store.get_many([layout.node(name) for name in changed]), strict=True):
            if data is not None:
                with contextlib.suppress(CorruptRecord):  # an agent of another version: not one to work with
                    record = decode(data, NodeRecord, layout.node(name))
                    self._nodes[name] = self._see(record, entries[name].tag, now)
        for name in self._nodes.keys() - entries.keys():
            del self._nodes[name]
        self._nodes[me.node] = _Seen(me, "", changed_at=now, proven=True, contradictions=0)
        self._evidence.attend([seen.record for name, seen in self._nodes.items() if name != me.node])
        self.view = {name: self._state(name, now) for name in sorted(self._nodes)}

    def _see(self, record: NodeRecord, tag: str, now: float) -> _Seen:
        before = self._nodes.get(record.node)
        if before is None or before.record.incarnation != record.incarnation:
            # A leftover of a dead node looks like a live one at first sight; a second beat, or an answer, proves it.
            return _Seen(record, tag, changed_at=now, proven=False, contradictions=0)
        gone = self._evidence.of(record.node, record.incarnation) == "gone"
        contradictions = before.contradictions + 1 if gone else 0
        return _Seen(record, tag, changed_at=now, proven=True, contradictions=contradictions)

    def _state(self, name: str, now: float) -> str:
        seen = self._nodes[name]
        if seen.record.node == self._me().node:
            return "leaving" if seen.record.notice else "live"
        sign = self._evidence.of(name, seen.record.incarnation)
        # One beat may have been on its way when the process died; two speak against the direct evidence (a firewall).
        if sign == "silent" or (sign == "gone" and seen.contradictions < 2):
            return "lost"
        if now - seen.changed_at > self._spec.lease_s:
            return "lost"
        if not seen.proven and sign != "up":
            return "new"
        return "leaving" if seen.record.notice else "live"

    def _lead(self, me: NodeRecord) -> bool:
        self._asked = set()
        self._take_new_jobs()
        moved = False
        for job in sorted(self.jobs, key=self._place):
            moved = self._lead_job(job, me) or moved
            current = self.jobs[job].value
            if current is None or current.phase == "wait":
                break  # first in, first out: who waits for nodes holds up those behind
        self._forget_ended()
        self._since = {key: at for key, at in self._since.items() if key in self._asked}
        return moved

    def _place(self, job: str) -> tuple[bool, int]:
        """Jobs that hold nodes, then the line."""
        current = self.jobs[job].value
        return current is None or not current.members, self._spec_of(job).number

    def _lead_job(self, job: str, me: NodeRecord) -> bool:
        spec = self._spec_of(job)
        known = self.jobs[job]
        if known.value and any(self.view.get(m.node) == "new" for m in known.value.members):
            return False  # a moment ago another node led: a member is not lost because we have not met it yet
        decision = decide(spec, known.value, self._sight(job, known.value, me))
        if decision is None:
            return False
        if self.lease.refresh() and not self.lease.is_held_by(me):
            return False
        self._ledger(job).commit(decision, known.number)
        self._refresh(job)
        if (current := self.jobs[job].value) and current.master_port:
            self._used_ports.setdefault(job, set()).add((current.members[0].node, current.master_port))
        return True

    def _sight(self, job: str, current: Round | None, me: NodeRecord) -> Sight:
        alive = {name: self._nodes[name].record for name, state in self.view.items() if state in ("live", "leaving")}
        busy = {
            member.node
            for other, version in self.jobs.items()
            if other != job and version.value is not None and version.value.phase in ("run", "drain")
            for member in version.value.members
        }
        answering = {name for name, r in alive.items() if self._evidence.of(name, r.incarnation) == "up"} | {me.node}
        return Sight(
            leader=me.node,
            epoch=self.lease.epoch,
            alive=alive,
            answering=answering,
            busy=busy,
            exits=self._read_exits(job, current) if current and current.members else {},
            cancelled=self._is_cancelled(job),
            used_ports=self._ports_used(job),
            elapsed=lambda what: self._elapsed(f"{job}/{current.number if current else 0}/{what}"),
            now=self._clock.time(),
            policy=self._policy,
        )

    def _elapsed(self, key: str) -> float:
        self._asked.add(key)
        now = self._clock.monotonic()
        return now - self._since.setdefault(key, now)

    def _read_exits(self, job: str, current: Round) -> dict[str, NodeExit]:
        """Exits of the members of ``current``: another life of a node does not speak for this one."""
        found = self._exits.setdefault((job, current.number), {})
        folder = layout.exits(job, current.number)
        names = [e.key.rsplit("/", 1)[-1].removesuffix(".json") for e in self._store.list(folder)]
        missing = [name for name in names if name not in found]
        keys = [layout.node_exit(job, current.number, name) for name in missing]
        for name, key, data in zip(missing, keys, self._store.get_many(keys), strict=True):
            if data is not None:
                node_exit = decode(data, NodeExit, key)
                if current.rank_of(node_exit.node, node_exit.incarnation) is not None:
                    found[name] = node_exit
        return found

    def _is_cancelled(self, job: str) -> bool:
        if job not in self._cancelled and self._store.get(layout.cancel(job)) is not None:
            self._cancelled.add(job)
        return job in self._cancelled

    def _ports_used(self, job: str) -> set[tuple[str, int]]:
        if job not in self._used_ports:
            entries = [version.value for version in self._ledger(job).history()]
            self._used_ports[job] = {(r.members[0].node, r.master_port) for r in entries if r and r.members}
        return set().union(*self._used_ports.values())

    def _spec_of(self, job: str) -> JobSpec:
        if job not in self._specs:
            key = layout.job_spec(job)
            data = self._store.get(key)
            self._specs[job] = decode(data or b"", JobSpec, key)
        return self._specs[job]


@dataclass(frozen=True, slots=True)
class _Seen:
    """A node's last heartbeat and when it last changed, by this node's monotonic clock."""

    record: NodeRecord
    tag: str
    _: KW_ONLY
    changed_at: float
    proven: bool
    """It is known to be alive, not only to have been."""
    contradictions: int
    """Changes of its heartbeat seen since direct evidence called it gone."""
