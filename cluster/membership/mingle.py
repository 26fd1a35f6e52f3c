"""Mingle: how a node meets the others under a job's ID, waits for rank 0, and learns the round it is in.

Call ``tick`` whenever something may have changed and at least once per heartbeat. It is synchronous and owns no
thread, so a test runs a whole cluster in one process under its own clock. All nodes run the same code:

- *rank 0* lists the heartbeats, takes new jobs from the line, and commits what ``rounds.decide`` says. Requests per
  second grow as the number of nodes.
- *the others* read one key, rank 0's heartbeat, which names the newest version of each unfinished job's ledger.

A new rank 0 writes the newest entry of every unfinished job again, in its own epoch, before it decides anything. What
its predecessor may still have on its way comes too late from then on, so no two of them ever decide side by side: not
for one job, and not by giving one node to two jobs.

Direct questions (``PeerEvidence``) only make it quick: without any answer the same things happen, a lease later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec.structs import replace

from gpuctl.cluster.agreement import ledgers
from gpuctl.cluster.agreement.ledger import Ledger, Version
from gpuctl.cluster.clock import Clock
from gpuctl.cluster.errors import CorruptRecord
from gpuctl.cluster.membership.failure_detector import FailureDetector, PeerEvidence, State
from gpuctl.cluster.membership.job_records import JobRecords
from gpuctl.cluster.membership.lease import Lease
from gpuctl.cluster.membership.rounds import Observation, RoundPolicy, decide
from gpuctl.cluster.records.clusters import ClusterSpec
from gpuctl.cluster.records.nodes import NodeRecord
from gpuctl.cluster.records.rounds import JobOutcome, Round
from gpuctl.cluster.storage.interface import Store

_MISSED_BEATS = 1.5
"""Of a rank 0 that is silent, after which another takes over: the silence alone may be a firewall's."""


class Mingle:
    """One node's part in the cluster's agreement. ``tick`` is for one thread; ``heartbeat`` may be called from another.

    Write a heartbeat before the first ``tick``: who has none counts as having left. ``tick`` raises
    ``StoreUnavailable`` with nothing lost: call it again.
    """

    def __init__(
        self,
        store: Store,
        clock: Clock,
        evidence: PeerEvidence,
        spec: ClusterSpec,
        me: Callable[[], NodeRecord],
        policy: RoundPolicy | None = None,
    ) -> None:
        self._store = store
        self._clock = clock
        self._failure_detector = FailureDetector(store, evidence, lease_s=spec.lease_s)
        self._me = me
        self._policy = policy or RoundPolicy(unsure_s=2.5 * spec.lease_s)
        self.lease = Lease(store, clock, lease_s=spec.lease_s, silent_lease_s=_MISSED_BEATS * spec.heartbeat_s)
        self.leads = False
        self.jobs: dict[str, Version[Round]] = {}
        """Every unfinished job known here and the newest entry of its ledger. While it waits in line that is round 0
        in phase ``wait``, or version 0 with nothing in it."""
        self.line = 0
        self.members: frozenset[str] = frozenset()
        """The nodes that live, as rank 0 sees them and says."""
        self.leader: NodeRecord | None = None
        """Rank 0's heartbeat, on the others."""
        self._ledgers: dict[str, Ledger[Round]] = {}
        self._records = JobRecords(store, self._ledger)
        self._queue: Ledger[str] = ledgers.queue(store)
        self._ended: set[str] = set()
        self._unsure: set[str] = set()
        self._since: dict[str, float] = {}
        self._asked: set[str] = set()
        self._now = 0.0
        self._turn = 0
        self._told: dict[str, Any] = {}

    @property
    def view(self) -> dict[str, State]:
        """On rank 0, its view of each node."""
        return dict(self._failure_detector.states)

    @property
    def alive(self) -> dict[str, NodeRecord]:
        """On rank 0, the records of the nodes that live."""
        return self._failure_detector.alive()

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
            record = self.leader = self.lease.watch()
            if not (self._may_lead(me, record) and self.lease.take(me)):
                self._follow(record)
        decided = False
        if self.lease.is_held_by(me):
            if not self.leads:
                self._take_over()
            self._now = self._clock.monotonic()
            self._failure_detector.look(me, self._now)
            if not self._failure_detector.time_counts:
                self._since.clear()
            self.members = _living(self._failure_detector.states)
            decided = self._lead(me)
        versions = {job: version.number for job, version in self.jobs.items()}
        self._told = {"rounds": versions, "line": self.line, "view": self.view} if self.leads else {}
        return decided

    # -- everybody ----------------------------------------------------------------------------------------------------

    def _may_lead(self, me: NodeRecord, record: NodeRecord | None) -> bool:
        holder = self.lease.holder
        if holder is None or holder.node == me.node:
            return True  # nobody, or an earlier life of this very node, which ended
        if record is None or record.incarnation != holder.incarnation:
            return True  # who leaves deletes its heartbeat; a new life is another one
        silent = self._failure_detector.is_silent(record)
        return self._failure_detector.is_gone(record) or self.lease.has_lapsed(silent=silent)

    def _follow(self, record: NodeRecord | None) -> None:
        holder = self.lease.holder
        if holder is None or record is None or (record.node, record.incarnation) != (holder.node, holder.incarnation):
            return
        self._failure_detector.meet(record)
        dropped = [job for job in self.jobs if job not in record.rounds] if record.line >= self.line else []
        self.members = _living(record.view)
        told = {job: version for job, version in record.rounds.items() if job not in self._ended}
        for job in told:
            self.jobs.setdefault(job, Version(None, 0))
        self.line = max(self.line, record.line)  # only now: who knows of the line knows of the jobs in it
        for job in dropped:
            self._refresh(job)
        for job, version in told.items():
            if version > self.jobs[job].number:
                self._refresh(job)
        self._forget_ended()

    def _refresh(self, job: str) -> None:
        newest = self._ledger(job).read()
        if newest.number > self.jobs.get(job, Version(None, -1)).number:
            self.jobs[job] = newest

    def _ledger(self, job: str) -> Ledger[Round]:
        return self._ledgers.setdefault(job, ledgers.rounds(self._store, job))

    def _forget_ended(self) -> None:
        for job, version in list(self.jobs.items()):
            if version.value is not None and version.value.phase == "ended":
                del self.jobs[job]
                self._ended.add(job)
                self._ledgers.pop(job, None)
                self._records.forget(job)

    # -- rank 0 -------------------------------------------------------------------------------------------------------

    def _take_over(self) -> None:
        """What the last rank 0 told of the line is not looked up again; where each job stands is (see ``_affirm``)."""
        self._unsure = set(self.jobs)
        self._failure_detector.forget()
        self._since.clear()
        self._records.forget_ports()
        self.leads = True

    def _take_new_jobs(self) -> None:
        for version in self._queue.since(self.line):
            if version.value is not None and version.value not in self._ended:
                self.jobs.setdefault(version.value, Version(None, 0))
                self._unsure.add(version.value)
            self.line = version.number

    def _affirm(self, job: str) -> bool:
        """Make ours the newest entry of a job that others may have written to, or we, when an answer got lost.

        ``False`` if a later rank 0 was here.
        """
        while job in self._unsure:
            self._refresh(job)
            known = self.jobs[job]
            current = known.value or Round(job=job, number=0, phase="wait", epoch=0, reason="in line")
            if current.phase == "ended":
                self._unsure.discard(job)
            elif current.epoch > self.lease.epoch:
                return False
            else:
                self._commit(job, self._judged(job, replace(current, epoch=self.lease.epoch)))
        return True

    def _judged(self, job: str, entry: Round) -> Round:
        """``entry``, or the end of a job whose spec cannot be read: it would hold up the line."""
        try:
            self._records.spec(job)
        except CorruptRecord as error:
            outcome = JobOutcome(result="failed", exit_code=2, message=str(error))
            return replace(entry, phase="ended", outcome=outcome, at=self._clock.time())
        return entry

    def _commit(self, job: str, entry: Round) -> bool:
        """Write the next entry; until it is known to be the newest, nothing else is decided."""
        number = self.jobs[job].number
        self._unsure.add(job)
        if not self._ledger(job).commit(entry, number):
            return False
        self.jobs[job] = Version(entry, number + 1)
        self._unsure.discard(job)
        return True

    def _lead(self, me: NodeRecord) -> bool:
        self._asked = set()
        self._take_new_jobs()
        moved = bool(self._unsure)
        if not all(self._affirm(job) for job in sorted(self._unsure)):
            return False
        self._forget_ended()
        line = sorted(self.jobs, key=self._place)
        behind: list[str] = []
        for place, job in enumerate(line):
            if self._waits(job) and any(v.value and v.value.phase == "drain" for v in self.jobs.values()):
                behind = line[place:]  # the nodes that are free may be what that job drains for
                break
            moved = self._lead_job(job, me) or moved
            if self._waits(job):
                behind = line[place + 1 :]  # first in, first out: who waits for nodes holds up those behind
                break
        if behind:
            # They can be cancelled: one look at one of them each time.
            self._turn += 1
            job = behind[self._turn % len(behind)]
            moved = (self._records.cancellation(job) is not None and self._lead_job(job, me)) or moved
        self._forget_ended()
        self._since = {key: at for key, at in self._since.items() if key in self._asked}
        return moved

    def _waits(self, job: str) -> bool:
        current = self.jobs[job].value
        return current is None or current.phase == "wait"

    def _place(self, job: str) -> tuple[bool, int]:
        """Jobs that hold nodes, then the line."""
        current = self.jobs[job].value
        return current is None or not current.members, self._records.spec(job).number

    def _lead_job(self, job: str, me: NodeRecord) -> bool:
        current = self.jobs[job].value
        if current and any(self._failure_detector.is_new(member) for member in current.members):
            return False  # a moment ago another node led: a member is not lost because we have not met it yet
        decision = decide(self._records.spec(job), current, self._observe(job, current, me))
        if decision is None:
            return False
        self.lease.refresh()
        return self.lease.is_held_by(me) and self._commit(job, decision)

    def _observe(self, job: str, current: Round | None, me: NodeRecord) -> Observation:
        alive = self._failure_detector.alive()
        busy = {
            member.node
            for other, version in self.jobs.items()
            if other != job and version.value is not None and version.value.phase in ("run", "drain")
            for member in version.value.members
        }
        cancellation = self._records.cancellation(job)
        answering = {name for name, record in alive.items() if self._failure_detector.answers(record)} | {me.node}
        return Observation(
            leader=me.node,
            epoch=self.lease.epoch,
            alive=alive,
            answering=answering,
            busy=busy,
            exits=self._records.exits(job, current) if current and current.members else {},
            cancelled=cancellation is not None,
            cancelled_now=cancellation is not None and cancellation.now,
            used_ports=self._records.used_ports(job, self.jobs[job]),
            elapsed=lambda what: self._elapsed(f"{job}/{current.number if current else 0}/{what}"),
            now=self._clock.time(),
            policy=self._policy,
        )

    def _elapsed(self, key: str) -> float:
        self._asked.add(key)
        return self._now - self._since.setdefault(key, self._now)


def _living(view: Mapping[str, str]) -> frozenset[str]:
    return frozenset(name for name, state in view.items() if state != "lost")
