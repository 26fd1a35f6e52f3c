"""Whether rank 0 and the others reach each other at the addresses told: a wrong one hangs launchers in silence."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

from gpuctl.bootstrap.network import inventory
from gpuctl.bootstrap.rendezvous.own_address import shown
from gpuctl.cluster import layout
from gpuctl.cluster.clock import Clock
from gpuctl.cluster.errors import GpuctlError
from gpuctl.cluster.network import tcp_probe
from gpuctl.cluster.network.records import NodeNetwork
from gpuctl.cluster.records.codec import decode, encode
from gpuctl.cluster.records.nodes import NodeRecord
from gpuctl.cluster.storage.bucket import Bucket

_AGAIN_S = 10.0
"""Between two looks at what could not be reached."""


class ReachWatch:
    """A node's look at others, from a thread: a connection to each that is new, and again to those that had none;
    ``on_news`` is called when that changes."""

    def __init__(self, store: Bucket, clock: Clock, node: str, on_news: Callable[[], None]) -> None:
        self._store = store
        self._clock = clock
        self._node = node
        self._on_news = on_news
        self._thread: threading.Thread | None = None
        self._looked_at: dict[tuple[str, int], float] = {}
        self._found: dict[str, str] = {}

    def trouble(self, nodes: Iterable[NodeRecord]) -> list[str]:
        """Who of these nodes cannot be reached, in words; empty as far as nobody is known to be."""
        others = {record.node: record for record in nodes if record.node != self._node}
        due = [record for record in others.values() if self._is_due(record)]
        if due and (self._thread is None or not self._thread.is_alive()):
            self._looked_at |= {(record.address, record.port): self._clock.monotonic() for record in due}
            self._thread = threading.Thread(target=self._look, args=(due,), name="reach", daemon=True)
            self._thread.start()
        return [why for node, why in sorted(self._found.items()) if node in others]

    def _is_due(self, record: NodeRecord) -> bool:
        looked_at = self._looked_at.get((record.address, record.port))
        if looked_at is None:
            return True
        return record.node in self._found and self._clock.monotonic() - looked_at > _AGAIN_S

    def _look(self, nodes: Sequence[NodeRecord]) -> None:
        targets = [tcp_probe.ProbeTarget(record.node, record.address, record.port, "agent") for record in nodes]
        for record, contact in zip(nodes, tcp_probe.contacts(targets), strict=True):
            if contact.ok:
                news = self._found.pop(record.node, None)
            else:
                where = f"{record.host or record.node} cannot be reached at {record.address}, port {record.port}"
                news = f"{where} ({contact.why}){self._others(record)}"
                self._found[record.node] = news
            if news:
                self._on_news()

    def _others(self, record: NodeRecord) -> str:
        """What other addresses that node has."""
        key = layout.network(record.node)
        try:
            network = decode(self._store.get(key) or b"", NodeNetwork, key)
        except GpuctlError:
            return ""
        return f"; it has {shown(network.interfaces)}: choose one there with --interface"


def merged(troubles: Iterable[str]) -> list[str]:
    """One for each address, though several nodes may tell of it, each with a reason of its own."""
    by_address: dict[str, str] = {}
    for line in troubles:
        by_address.setdefault(line.partition(" (")[0], line)
    return list(by_address.values())


def write_interfaces(store: Bucket, record: NodeRecord) -> None:
    """Write down this node's interfaces, for others to name them. Raises as ``Store.put`` does."""
    machine = inventory.machine("", address=record.address)
    network = inventory.here(machine, record.node, record.incarnation, env={})
    store.put(layout.network(record.node), encode(network))
