"""Who leads: a lease in a ledger, watched by everybody's own monotonic clock.

The leader renews nothing: its heartbeat is the renewal. A node that has not seen that heartbeat *change* for the lease
time, or knows by direct evidence that the process is gone, commits the next version in its own name. The ledger lets
one of them win. The lease decides who may act, not what is true: all that is acted on is a ledger of its own, so a
deposed leader that has not noticed yet can only lose a race.
"""

from __future__ import annotations

import contextlib

from gpuctl.cluster import layout
from gpuctl.cluster.agreement import ledgers
from gpuctl.cluster.agreement.ledger import Version
from gpuctl.cluster.clock import Clock
from gpuctl.cluster.errors import CorruptRecord
from gpuctl.cluster.records.codec import decode
from gpuctl.cluster.records.nodes import NodeRecord, Rank0
from gpuctl.cluster.storage.interface import Store

_FULL_READ_EVERY = 10
"""Looks at the ledger between two that list it, for the case that the next version was pruned while this node slept."""


class Lease:
    """One node's view of the rank-0 ledger."""

    def __init__(self, store: Store, clock: Clock, *, lease_s: float, silent_lease_s: float | None = None) -> None:
        """``silent_lease_s``: the lease time once the holder is silent as well; by default the usual one."""
        self._store = store
        self._clock = clock
        self._lease_s = lease_s
        self._silent_lease_s = lease_s if silent_lease_s is None else silent_lease_s
        self._ledger = ledgers.lease(store)
        self._known: Version[Rank0] = Version(None, 0)
        self._looks = 0
        self._beat: tuple[str, int] | None = None
        self._changed_at = clock.monotonic()
        self._holders_lease_s = lease_s

    @property
    def holder(self) -> Rank0 | None:
        return self._known.value

    @property
    def epoch(self) -> int:
        return self._known.number

    def is_held_by(self, me: NodeRecord) -> bool:
        return self.holder is not None and (self.holder.node, self.holder.incarnation) == (me.node, me.incarnation)

    def refresh(self) -> bool:
        """Look at the ledger; ``True`` if rank 0 is now another one than before."""
        self._looks += 1
        full = self._known.number == 0 or self._looks % _FULL_READ_EVERY == 0
        newest = self._ledger.read() if full else self._ledger.newer(self._known.number)
        if newest is None or newest.number <= self._known.number:
            return False
        self._known = newest
        self._beat = None
        self._changed_at = self._clock.monotonic()
        return True

    def watch(self) -> NodeRecord | None:
        """Read the holder's heartbeat and note whether it changed. ``None``: there is none that we understand."""
        if self.holder is None:
            return None
        key = layout.node(self.holder.node)
        data = self._store.get(key)
        record = None
        with contextlib.suppress(CorruptRecord):  # an agent of another version
            record = decode(data, NodeRecord, key) if data is not None else None
        self._holders_lease_s = (record.lease_s if record else 0.0) or self._lease_s
        seen = (record.incarnation, record.beat) if record else None
        if seen != self._beat:
            self._beat = seen
            self._changed_at = self._clock.monotonic()
        return record

    def has_lapsed(self, *, silent: bool = False) -> bool:
        """Nobody holds it, or the holder's heartbeat has stood still for the lease time. ``silent``: it says nothing
        to those that it is connected to either."""
        lease_s = self._silent_lease_s if silent else self._holders_lease_s
        return self.holder is None or self._clock.monotonic() - self._changed_at > lease_s

    def take(self, me: NodeRecord) -> bool:
        """Try to become rank 0 after the version known; on defeat, ``holder`` is whoever won."""
        mine = Rank0(node=me.node, incarnation=me.incarnation, address=me.address, port=me.port)
        self._ledger.commit(mine, self._known.number)
        self._known = self._ledger.read()
        self._beat = None
        self._changed_at = self._clock.monotonic()
        return self.is_held_by(me)
