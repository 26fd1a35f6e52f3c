"""Which nodes are taken for lost by the age of their heartbeats, by the clock of the one that leads."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpuctl.cluster import layout
from gpuctl.cluster.membership.failure_detector import FailureDetector, PeerState
from gpuctl.cluster.records.codec import encode
from gpuctl.cluster.records.nodes import NodeRecord
from gpuctl.cluster.storage.bucket import Bucket, open_bucket

LEASE_S = 3.0


class NoContact:
    """Nothing but heartbeats tells of the others."""

    def of(self, node: str, incarnation: str) -> PeerState:  # noqa: ARG002
        return "unknown"

    def attend(self, records: Iterable[NodeRecord]) -> None:
        pass


class Nodes:
    """Those named ``a``, which looks, and ``b``; a heartbeat is written for whoever beats."""

    def __init__(self, store: Bucket, **fields: Any) -> None:
        self._store = store
        self._records = {
            name: NodeRecord(node=name, incarnation=f"{name}-1", beat=0, address="h", port=1, **fields) for name in "ab"
        }
        self.detector = FailureDetector(store, NoContact(), lease_s=LEASE_S)
        self.now = 100.0

    def beat(self, names: str) -> None:
        for name in names:
            record = self._records[name]
            self._records[name] = msgspec.structs.replace(record, beat=record.beat + 1)
            self._store.put(layout.node(name), encode(self._records[name]))

    def look(self, *, after_s: float = 0.5) -> str:
        self.now += after_s
        self.detector.look(self._records["a"], self.now)
        return self.detector.states["b"]


@pytest.fixture
def nodes(tmp_path: Path) -> Nodes:
    nodes = Nodes(open_bucket(f"file://{tmp_path}"))
    for _ in range(4):
        nodes.beat("ab")
        nodes.look()
    assert nodes.look() == "live"
    return nodes


@pytest.mark.parametrize("every", [1, 5])
def test_a_node_that_ended_is_lost_however_slow_the_bucket_takes_heartbeats(nodes: Nodes, every: int) -> None:
    """``every``: looks between two heartbeats of the one that looks, in a bucket that takes ten times as long."""
    for number in range(40):
        if number % every == 0:
            nodes.beat("ab")
        nodes.look()
    seen = []
    for number in range(40):
        if number % every == 0:
            nodes.beat("a")
        seen.append(nodes.look())
    assert seen[-1] == "lost"
    assert "lost" not in seen[: int(LEASE_S / 0.5) - every], "before its lease was over"


def test_nobody_is_lost_while_the_bucket_takes_nothing_nor_when_it_does_again(nodes: Nodes) -> None:
    assert {nodes.look() for _ in range(60)} == {"live"}
    assert not nodes.detector.time_counts
    nodes.beat("a")
    assert nodes.look() == "live"
    nodes.beat("ab")
    assert nodes.look() == "live" and nodes.detector.time_counts


def test_a_node_that_does_not_come_back_after_that_is_lost(nodes: Nodes) -> None:
    for _ in range(60):
        nodes.look()
    seen = []
    for _ in range(10):
        nodes.beat("a")
        seen.append(nodes.look())
    assert seen[0] == "live" and seen[-1] == "lost"


def test_a_node_that_beats_seldom_says_so_and_is_waited_for(tmp_path: Path) -> None:
    nodes = Nodes(open_bucket(f"file://{tmp_path}"), lease_s=30.0)
    for _ in range(4):
        nodes.beat("ab")
        assert nodes.look(after_s=10.0) in ("new", "live")
    assert nodes.look(after_s=LEASE_S + 1) == "live"
    nodes.beat("a")
    assert nodes.look(after_s=10.0) == "live"
    nodes.beat("a")
    assert nodes.look(after_s=20.0) == "lost"
