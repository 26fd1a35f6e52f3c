"""Whether rank 0 reaches the nodes at the addresses that they have told: a wrong one hangs launchers in silence."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

from gpuctl.bootstrap.network import inventory
from gpuctl.bootstrap.rendezvous.own_address import shown
from gpuctl.cluster import layout
from gpuctl.cluster.errors import GpuctlError
from gpuctl.cluster.network import tcp_probe
from gpuctl.cluster.network.records import NodeNetwork
from gpuctl.cluster.records.codec import decode, encode
from gpuctl.cluster.records.nodes import NodeRecord
from gpuctl.cluster.storage.bucket import Bucket


class ReachWatch:
    """Rank 0's look at the others: one connection to each node that is new, on a thread; ``on_news`` is called when one
    cannot be had."""

    def __init__(self, store: Bucket, node: str, on_news: Callable[[], None]) -> None:
        self._store = store
        self._node = node
        self._on_news = on_news
        self._thread: threading.Thread | None = None
        self._tried: set[tuple[str, int]] = set()
        self._found: dict[str, str] = {}

    def trouble(self, living: Mapping[str, NodeRecord]) -> str:
        """Who of these nodes cannot be reached, in words; empty as far as nobody is known to be."""
        new = [r for r in living.values() if (r.address, r.port) not in self._tried and r.node != self._node]
        if new and (self._thread is None or not self._thread.is_alive()):
            self._tried |= {(record.address, record.port) for record in new}
            self._thread = threading.Thread(target=self._look, args=(new,), name="reach", daemon=True)
            self._thread.start()
        return "; ".join(why for node, why in sorted(self._found.items()) if node in living)

    def _look(self, nodes: Sequence[NodeRecord]) -> None:
        targets = [tcp_probe.ProbeTarget(record.node, record.address, record.port, "agent") for record in nodes]
        for record, contact in zip(nodes, tcp_probe.contacts(targets), strict=True):
            if not contact.ok:
                where = f"{record.host or record.node} cannot be reached at {record.address}, port {record.port}"
                self._found[record.node] = f"{where} ({contact.why}){self._others(record)}"
                self._on_news()

    def _others(self, record: NodeRecord) -> str:
        """What other addresses that node has."""
        key = layout.network(record.node)
        try:
            network = decode(self._store.get(key) or b"", NodeNetwork, key)
        except GpuctlError:
            return ""
        return f"; it has {shown(network.interfaces)}: choose one there with --interface"


def write_interfaces(store: Bucket, record: NodeRecord) -> None:
    """Write down this node's interfaces, for rank 0 to name them. Raises as ``Store.put`` does."""
    machine = inventory.machine("", address=record.address)
    network = inventory.here(machine, record.node, record.incarnation, env={})
    store.put(layout.network(record.node), encode(network))
