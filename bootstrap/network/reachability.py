"""Keeps ``net/<node>.json`` true: this node's interfaces, and which other nodes' ports it reaches."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Mapping

import msgspec

from gpuctl.bootstrap.network import inventory
from gpuctl.cluster import layout
from gpuctl.cluster.errors import GpuctlError
from gpuctl.cluster.network import tcp_probe
from gpuctl.cluster.network.records import ConnectAttempt
from gpuctl.cluster.records.codec import decode, encode
from gpuctl.cluster.records.nodes import NodeRecord
from gpuctl.cluster.storage.bucket import Bucket

EVERY_S = 60.0
"""Between two looks when nothing seems to have changed: a firewall that somebody shuts tells nobody."""
_SETTLE_S = 1.0
"""Nodes come and go together; one look is enough for all of them."""


class Reachability:
    """Probes whether the other nodes can be reached, on a thread: when it starts, when the nodes that live are others
    than before, and every ``every_s``; it writes when what it found is new. The bucket's failures only put that off."""

    def __init__(
        self,
        store: Bucket,
        me: Callable[[], NodeRecord],
        env: Mapping[str, str],
        provider: str,
        every_s: float = EVERY_S,
    ) -> None:
        self._store = store
        self._me = me
        self._env = inventory.chosen(env)
        self._provider = provider
        self._every_s = every_s
        self._members: frozenset[str] = frozenset()
        self._others: dict[str, NodeRecord] = {}
        self._changed = threading.Event()
        self._stopped = threading.Event()
        self._said: object = None
        self._thread = threading.Thread(target=self._run, name="reachability", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def members(self, names: frozenset[str]) -> None:
        """Who lives now. Cheap: call it as often as you like."""
        if names != self._members:
            self._members = names
            self._changed.set()

    def stop(self) -> None:
        """What was told is taken back, since nobody keeps it true any more. Raises as ``Store.delete`` does.

        A look that is on its way is not waited for: a node that leaves has no time, and nobody reads what a dead one
        has told."""
        self._stopped.set()
        self._changed.set()
        self._store.delete([layout.network(self._me().node)])

    def _run(self) -> None:
        while not self._stopped.is_set():
            self._changed.clear()
            with contextlib.suppress(GpuctlError, OSError):
                self._look()
            if self._changed.wait(self._every_s):
                self._stopped.wait(_SETTLE_S)

    def _look(self) -> None:
        me = self._me()
        machine = inventory.machine(self._provider, address=me.address)
        network = inventory.here(machine, me.node, me.incarnation, self._env)
        network = msgspec.structs.replace(network, contacts=tuple(self._contacts(me)), at=time.time())
        if not self._stopped.is_set() and network.essence() != self._said:
            self._store.put(layout.network(me.node), encode(network))
            self._said = network.essence()

    def _contacts(self, me: NodeRecord) -> list[ConnectAttempt]:
        """The others' agents and servers of checkpoints. Not the ports they hold for a rendezvous: those are used once,
        and whoever connects to one would be the first."""
        wanted = self._members - {me.node}
        self._others = {name: record for name, record in self._others.items() if name in wanted}
        self._read(wanted - self._others.keys())
        found = self._reached(self._others)
        failed = {contact.node for contact in found if not contact.ok}
        before = {name: self._others[name] for name in failed}
        self._read(failed)  # an agent that was started anew has other ports
        again = {name for name in failed if _ports(self._others[name]) != _ports(before[name])}
        return [c for c in found if c.node not in again] + self._reached({n: self._others[n] for n in sorted(again)})

    def _reached(self, others: Mapping[str, NodeRecord]) -> list[ConnectAttempt]:
        return tcp_probe.contacts(
            tcp_probe.ProbeTarget(name, others[name].address, port, service)
            for name in sorted(others)
            for service, port in _ports(others[name]).items()
        )

    def _read(self, names: Collection[str]) -> None:
        keys = [layout.node(name) for name in sorted(names)]
        for key, data in zip(keys, self._store.get_many(keys) if keys else [], strict=True):
            if data is not None:
                record = decode(data, NodeRecord, key)
                self._others[record.node] = record


def _ports(record: NodeRecord) -> dict[str, int]:
    found = {"agent": record.port, "checkpoints": record.tier_port}
    return {service: port for service, port in found.items() if port}
