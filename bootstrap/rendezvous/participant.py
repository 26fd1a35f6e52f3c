"""A node's part in a run. It takes part in the same agreement as a node of a cluster (``cluster.membership``), with the
run as its only job; there is no interpreter to keep warm, no log to ship and nothing to prepare.

While a node waits it costs little: a heartbeat every ten seconds in a bucket that bills requests. It is quick all the
same, because whoever comes, leaves or decides tells rank 0 directly.
"""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from msgspec.structs import replace

from gpuctl import __version__
from gpuctl.bootstrap.agent.heartbeat import Heartbeat
from gpuctl.bootstrap.agent.reconcile import Reconciler, Work
from gpuctl.bootstrap.ports import PortPool
from gpuctl.bootstrap.rendezvous.reach import ReachWatch, merged, write_interfaces
from gpuctl.bootstrap.rendezvous.runs import LEASE_S, Run
from gpuctl.bootstrap.wake import Wake
from gpuctl.cluster import layout
from gpuctl.cluster.clock import Clock
from gpuctl.cluster.errors import GpuctlError
from gpuctl.cluster.jobs import queue
from gpuctl.cluster.membership.mingle import Mingle
from gpuctl.cluster.membership.peers import Peers
from gpuctl.cluster.membership.rounds import RoundPolicy
from gpuctl.cluster.records.clusters import ClusterSpec
from gpuctl.cluster.records.nodes import NodeRecord
from gpuctl.cluster.records.rounds import JobOutcome, Round

_BEAT_S = 1.0
_SILENT_S = 2.0
_WAITING_BEAT_S = 10.0
"""In a bucket that bills requests: an hour of waiting costs less than a cent (see ``docs/guides/mingle.md``)."""
_WAITING_LEASE_S = 30.0
_DUE_S = 0.25
_LINGER_S = 2.0
"""For the others to have learned of the end from rank 0, before it leaves."""
_POLICY = RoundPolicy(gather_s=3.0, unsure_s=2.5 * LEASE_S)
_NAME = re.compile(r"[^A-Za-z0-9.-]+")


@dataclass(frozen=True, slots=True)
class Attendee:
    """Who comes: how the others reach it, and the rank that it has chosen, if any."""

    host: str
    address: str
    rank: int | None = None
    master_port: int = 0
    """Should it be rank 0: the port for the rendezvous; 0: one that is free."""

    def name(self) -> str:
        """Of the node: the host's, and something of its own, since several may come from one host."""
        return f"{_NAME.sub('-', self.host).strip('-.')[:40] or 'node'}-{secrets.token_hex(2)}"


class Begin(Protocol):
    """Starts this node's part in a round; ``on_end`` is to be called when its ``exit`` is there."""

    def __call__(self, round_: Round, rank: int, on_end: Callable[[], None]) -> Work: ...


class Participant:
    """One node of a run, from its arrival until it leaves. One thread uses it, and calls ``turn`` again and again."""

    def __init__(self, run: Run, attendee: Attendee, begin: Begin, clock: Clock, say: Callable[[str], None]) -> None:
        self.run = run
        self.node = attendee.name()
        self._attendee = attendee
        self._begin = begin
        self._clock = clock
        self._say = say
        self._wake = Wake()
        self._incarnation = secrets.token_hex(6)
        self._started_at = clock.time()
        self._waits = True
        self._trouble: list[str] = []
        self.was_in_a_round = False
        self._free = run.store.url.startswith("file:")
        self._ports = None if attendee.master_port else PortPool(attendee.address)
        self._peers = Peers(clock, token=run.spec.key, silent_s=_SILENT_S, on_news=self._wake.set)
        self._port = self._peers.start(attendee.address)
        spec = ClusterSpec(
            name=run.id,
            provider="mingle",
            nodes_min=run.spec.nodes_min,
            nodes_max=run.spec.nodes_max,
            lease_s=LEASE_S,
            heartbeat_s=_BEAT_S,
        )
        self._mingle = Mingle(run.store, clock, self._peers, spec, self._record, _POLICY)
        self._heartbeat = Heartbeat(run.store, self._beat_s, self._mingle.heartbeat)
        around = _Surroundings(self._heartbeat, self._peers, self._wake)
        self._reconciler: Reconciler[Work] = Reconciler(
            self.node, self._incarnation, run.store, clock, self._mingle, self._start, around
        )
        self._reach = ReachWatch(run.store, clock, self.node, self._wake.set)
        self._peers.introduce(self._record())

    # -- what is known ------------------------------------------------------------------------------------------------

    @property
    def work(self) -> Work | None:
        """This node's part in the round that runs."""
        return self._reconciler.work

    @property
    def round(self) -> Round | None:
        """The newest round of the run, as far as this node knows."""
        version = self._mingle.jobs.get(self.run.id)
        return version.value if version else None

    @property
    def here(self) -> Sequence[str]:
        """Names of the nodes that live, as rank 0 sees them; this one alone, before it has met the others."""
        return sorted(self._mingle.members | {self.node})

    @property
    def trouble(self) -> list[str]:
        """Which nodes cannot be reached by rank 0, or do not reach it, in words."""
        leader = self._mingle.leader
        return merged([*self._trouble, *(leader.trouble.splitlines() if leader else ())])

    def outcome(self) -> JobOutcome | None:
        """How the run ended; ``None`` while it goes on. Raises as ``Store.get`` does."""
        if self._mingle.line and self.run.id not in self._mingle.jobs:
            return queue.outcome(self.run.store, self.run.id)
        return None

    # -- what is done -------------------------------------------------------------------------------------------------

    def arrive(self) -> None:
        """Be seen by the others. Raises ``StoreUnavailable``: call it again."""
        write_interfaces(self.run.store, self._record())
        self._heartbeat.send()
        self._wake.set()
        self._heartbeat.start(lambda: self._clock.monotonic() - self._reconciler.ticked_at < 2 * self._beat_s + LEASE_S)

    def turn(self, at_most_s: float = _WAITING_BEAT_S) -> None:
        """Wait until something may have changed, and do what follows from it. Raises ``GpuctlError`` if the bucket
        cannot be had: the next turn goes on from there."""
        self._wake.wait(min(self._beat_s, at_most_s, _DUE_S if self._is_due else at_most_s))
        self._reconciler.turn()
        waits = self._reconciler.work is None
        if waits != self._waits:
            self._waits = waits
            self._heartbeat.pace(self._beat_s)
            self._heartbeat.send()
        if (trouble := self._look_for_trouble()) != self._trouble:
            self._trouble = trouble
            self._heartbeat.send()
            self._peers.poke()

    def _look_for_trouble(self) -> list[str]:
        """Rank 0 looks at all, and says what they say; the others look at rank 0, whose port their commands need."""
        if not self._mingle.leads:
            leader = self._mingle.leader
            return self._reach.trouble([leader] if leader else [])
        alive = self._mingle.alive.values()
        told = [line for record in alive if record.node != self.node for line in record.trouble.splitlines()]
        return merged([*self._reach.trouble(alive), *told])

    def wake(self) -> None:
        """End the wait of ``turn``. Safe in a signal handler."""
        self._wake.set()

    def take_notice(self, lead_s: float, source: str) -> None:
        """This node is to leave within ``lead_s`` seconds. Safe in a signal handler."""
        self._reconciler.take_notice(lead_s, source)

    @property
    def left_s(self) -> float:
        """Seconds until this node is to have left; only after a notice."""
        return self._reconciler.left_s

    def may_leave(self) -> bool:
        """After a notice: whether nothing of this node is needed any more, or its time is over."""
        return self._reconciler.may_leave()

    def linger(self) -> None:
        """Rank 0 stays for a moment after the end, so that the others learn of it and need not elect another one."""
        deadline = self._clock.monotonic() + _LINGER_S
        while self._mingle.leads and len(self._mingle.members) > 1 and self._clock.monotonic() < deadline:
            self._wake.wait(0.1)
            with contextlib.suppress(GpuctlError):
                self._reconciler.turn()

    def end_work(self, within_s: float) -> None:
        """Ask what runs here to end, and kill it after ``within_s`` seconds: what a round would do, when nobody can be
        asked for one."""
        work, round_ = self._reconciler.work, self.round
        if work is None or round_ is None:
            return
        draining = replace(round_, phase="drain", drain_s=max(0.0, within_s))
        while work.exit is None:
            work.ask_to_stop(draining)
            self._wake.wait(_DUE_S)

    def leave(self, *, told: bool = True) -> None:
        """Be gone for the others, at once. What runs here is killed. ``told``: they learn it from the bucket, too;
        else from the connections alone, which takes no time when the bucket does not answer."""
        if self._reconciler.work is not None:
            self._reconciler.work.kill()
        if told:
            self._heartbeat.end()
            with contextlib.suppress(GpuctlError):
                self._leave_bucket()
        self._heartbeat.end_soon()
        self._peers.stop()
        if self._ports is not None:
            self._ports.close()

    def _leave_bucket(self) -> None:
        self.run.store.delete([layout.node(self.node), layout.network(self.node)])
        never_ran = self.round is None or self.round.number == 0
        if never_ran and self.outcome() is None and not self.run.store.list(layout.NODES):
            queue.end_as_cancelled(self.run.store, self.run.id, "all its nodes have left")

    # -- for the agreement --------------------------------------------------------------------------------------------

    @property
    def _beat_s(self) -> float:
        return _WAITING_BEAT_S if self._waits and not self._free else _BEAT_S

    @property
    def _is_due(self) -> bool:
        """Something is to be done here as soon as a little time has passed: by rank 0 if enough nodes wait, or one that
        a round has room for, and by any other if rank 0 has fallen silent."""
        leader = self._mingle.leader
        if not self._mingle.leads:
            return leader is not None and self._peers.of(leader.node, leader.incarnation) == "silent"
        here, round_ = len(self._mingle.members), self.round
        if self._waits or round_ is None:
            return here >= self.run.spec.nodes_min
        return len(round_.members) < min(here, self.run.spec.nodes_max)

    def _start(self, round_: Round, rank: int) -> Work:
        if rank == 0 and self._ports is not None and (listening := self._ports.take(round_.master_port)):
            listening.close()  # the command listens there
        self.was_in_a_round = True
        return self._begin(round_, rank, self._wake.set)

    def _record(self) -> NodeRecord:
        work = self._reconciler.work
        return NodeRecord(
            node=self.node,
            incarnation=self._incarnation,
            beat=0,
            address=self._attendee.address,
            port=self._port,
            spare_ports=self._ports.offered() if self._ports else (),
            master_port=self._attendee.master_port,
            ready=True,
            drainable=work is not None and work.exit is None,
            notice=self._reconciler.notice,
            trouble="\n".join(self._trouble),
            rank=self._attendee.rank,
            host=self._attendee.host,
            lease_s=_WAITING_LEASE_S if self._beat_s > _BEAT_S else 0.0,
            version=__version__,
            started_at=self._started_at,
        )


@dataclass(frozen=True, slots=True)
class _Surroundings:
    """See ``reconcile.Surroundings``."""

    heartbeat: Heartbeat
    peers: Peers
    wake_up: Wake

    @property
    def told_of_notice(self) -> bool:
        return self.heartbeat.told_of_notice

    def send_heartbeat(self) -> None:
        self.heartbeat.send()

    def poke(self) -> None:
        self.peers.poke()

    def wake(self) -> None:
        self.wake_up.set()

    def say(self, line: str) -> None:
        """What a round came to is told by ``progress``."""
