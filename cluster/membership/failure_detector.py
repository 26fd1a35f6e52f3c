"""What rank 0 sees of the nodes: their heartbeats, when these last changed by its own clock, and direct evidence."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass, replace
from typing import Literal, Protocol

from gpuctl.cluster import layout
from gpuctl.cluster.errors import CorruptRecord
from gpuctl.cluster.records.codec import decode
from gpuctl.cluster.records.nodes import NodeRecord
from gpuctl.cluster.records.rounds import Member
from gpuctl.cluster.storage.interface import Store

PeerState = Literal["up", "gone", "silent", "unknown"]
State = Literal["live", "leaving", "lost", "new"]


class PeerEvidence(Protocol):
    """What direct contact shows about another agent's liveness (see ``peers``)."""

    def of(self, node: str, incarnation: str) -> PeerState:
        """``up``: it keeps a connection; ``gone``: the connection broke and its port refuses a new one; ``silent``: it
        was up and nothing comes any more; ``unknown``: never met."""
        ...

    def attend(self, records: Iterable[NodeRecord]) -> None:
        """Keep a connection to each of these: rank 0 to all, the others to rank 0."""
        ...


class FailureDetector:
    """Decides which nodes are alive. Call ``look`` before asking; all answers are of that moment."""

    def __init__(self, store: Store, evidence: PeerEvidence, *, lease_s: float) -> None:
        self._store = store
        self._evidence = evidence
        self._lease_s = lease_s
        self._nodes: dict[str, _LastSeen] = {}
        self._contradictions: dict[tuple[str, str], tuple[int, int]] = {}
        self._own_tag: str | None = None
        self._own_at = 0.0
        self._own_gap_s = 0.0
        self._takes_writes = True
        self.time_counts = True
        """Not while the bucket takes no writes, nor at the moment in which it does again: what others should have
        written meanwhile is not held against them."""
        self.states: dict[str, State] = {}

    def forget(self) -> None:
        """What was seen long ago, when this node led before."""
        self._nodes.clear()

    def look(self, me: NodeRecord, now: float) -> None:
        """List the heartbeats and read those that changed. ``now``: monotonic seconds."""
        folder = f"{layout.NODES}/"
        tags = {
            entry.key.removeprefix(folder).removesuffix(".json"): entry.tag for entry in self._store.list(layout.NODES)
        }
        self._note_writes(tags.get(me.node), me.lease_s or self._lease_s, now)
        others = {name: tag for name, tag in tags.items() if name != me.node}
        changed = [name for name, tag in others.items() if name not in self._nodes or self._nodes[name].tag != tag]
        for name, data in zip(changed, self._store.get_many([layout.node(name) for name in changed]), strict=True):
            if data is not None:
                with contextlib.suppress(CorruptRecord):  # an agent of another version: not one to work with
                    record = decode(data, NodeRecord, layout.node(name))
                    self._nodes[name] = self._see(record, tags[name], now)
        for name in self._nodes.keys() - tags.keys():
            del self._nodes[name]
        self._nodes[me.node] = _LastSeen(me, "", changed_at=now, proven=True)
        self._evidence.attend([seen.record for name, seen in self._nodes.items() if name != me.node])
        self.states = {name: self._state(self._nodes[name], me, now) for name in sorted(self._nodes)}

    def alive(self) -> dict[str, NodeRecord]:
        """Records of the nodes that are known to live, those about to leave included."""
        return {name: self._nodes[name].record for name, state in self.states.items() if state in ("live", "leaving")}

    def answers(self, record: NodeRecord) -> bool:
        return self._evidence.of(record.node, record.incarnation) == "up"

    def is_new(self, member: Member) -> bool:
        """Whether this life of a node has been seen, but not yet for long enough to say that it lives."""
        seen = self._nodes.get(member.node)
        known = seen is not None and seen.record.incarnation == member.incarnation
        return known and self.states[member.node] == "new"

    def meet(self, leader: NodeRecord) -> None:
        """Keep a connection to rank 0, which so learns at once of a node that has just come."""
        self._evidence.attend([leader])

    def is_silent(self, record: NodeRecord) -> bool:
        return self._evidence.of(record.node, record.incarnation) == "silent"

    def is_gone(self, record: NodeRecord) -> bool:
        """Direct evidence says so, and the heartbeat does not contradict it.

        One beat may have been on its way when the process died; two more mean a firewall.
        """
        life = (record.node, record.incarnation)
        if self._evidence.of(*life) != "gone":
            self._contradictions.pop(life, None)
            return False
        beat, changes = self._contradictions.get(life, (record.beat, 0))
        changes += record.beat != beat
        self._contradictions[life] = (record.beat, changes)
        return changes < 2

    def _note_writes(self, own_tag: str | None, lease_s: float, now: float) -> None:
        """Whether the bucket takes what is written, by our own heartbeat: while that does not get there, as in a bucket
        that is full, those of the others say nothing of them. Once it does, they have a lease's time again. In a bucket
        that is always slow only what is slower still counts as late, or no node would ever be lost."""
        gap_s = now - self._own_at
        late = self._own_tag is not None and gap_s > max(lease_s / 2, 2 * self._own_gap_s)
        if own_tag is None or own_tag == self._own_tag:
            self._takes_writes = self.time_counts = not late
            return
        if late:
            self._nodes = {name: replace(seen, changed_at=now) for name, seen in self._nodes.items()}
        self._own_gap_s = gap_s if self._own_tag is not None else 0.0
        self._own_tag, self._own_at, self._takes_writes = own_tag, now, True
        self.time_counts = not late

    def _see(self, record: NodeRecord, tag: str, now: float) -> _LastSeen:
        """A leftover of a dead node looks like a live one at first sight; a second beat, or an answer, proves it."""
        before = self._nodes.get(record.node)
        proven = before is not None and before.record.incarnation == record.incarnation
        return _LastSeen(record, tag, changed_at=now, proven=proven)

    def _state(self, seen: _LastSeen, me: NodeRecord, now: float) -> State:
        if seen.record.node != me.node:
            sign = self._evidence.of(seen.record.node, seen.record.incarnation)
            stands_still = self._takes_writes and now - seen.changed_at > (seen.record.lease_s or self._lease_s)
            if sign == "silent" or self.is_gone(seen.record) or stands_still:
                return "lost"
            if not seen.proven and sign != "up":
                return "new"
        return "leaving" if seen.record.notice else "live"


@dataclass(frozen=True, slots=True)
class _LastSeen:
    """A node's last heartbeat and when it last changed, by this node's monotonic clock."""

    record: NodeRecord
    tag: str
    _: KW_ONLY
    changed_at: float
    proven: bool
    """It is known to be alive, not only to have been."""
