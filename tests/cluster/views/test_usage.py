"""How long machines were there, by what the bucket has of them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from gpuctl.cluster import layout
from gpuctl.cluster.records.codec import encode
from gpuctl.cluster.records.nodes import BootReport, NodeRecord
from gpuctl.cluster.storage.bucket import Bucket, open_bucket
from gpuctl.cluster.views import usage
from gpuctl.stacks.providers.ownership import forget_nodes


@pytest.fixture
def store(tmp_path: Path) -> Bucket:
    return open_bucket(tmp_path.as_uri())


def _boots(store: Bucket, node: str, state: Literal["booting", "ready"] = "ready", at: float = 1000.0) -> None:
    told = BootReport(
        node=node,
        state=state,
        type="g5.xlarge",
        zone="us-east-1a",
        life="spot",
        booted_at=at,
    )
    store.put(layout.boot_report(node), encode(told))


def _beats(store: Bucket, node: str) -> float:
    """When, by the store."""
    record = NodeRecord(node=node, incarnation="i", beat=1, address="10.0.0.1", port=1)
    store.put(layout.node(node), encode(record))
    return next(entry.modified for entry in store.list(layout.NODES) if entry.key == layout.node(node))


def test_a_machine_that_lives_is_paid_for_until_now(store: Bucket) -> None:
    _boots(store, "a")
    seen = _beats(store, "a")
    (machine,) = usage.read(store, seen + 60)
    assert (machine.since, machine.until) == (1000.0, seen + 60)


def test_one_that_fell_silent_until_it_was_last_heard_of(store: Bucket) -> None:
    _boots(store, "a")
    seen = _beats(store, "a")
    (machine,) = usage.read(store, seen + 86400)
    assert machine.until == seen


def test_one_that_boots_tells_of_itself_less_often(store: Bucket) -> None:
    _boots(store, "a", "booting")
    told = store.list(layout.BOOT)[0].modified
    assert usage.read(store, told + 1000)[0].until == told + 1000
    assert usage.read(store, told + 10_000)[0].until == told


def test_what_was_there_is_known_when_the_cluster_is_gone(store: Bucket) -> None:
    for node, at in (("b", 2000.0), ("a", 1000.0)):
        _boots(store, node, at=at)
        _beats(store, node)
    before = usage.read(store)
    forget_nodes(store, of="")
    assert not store.list(layout.BOOT) and not store.list(layout.NODES)
    after = usage.read(store)
    assert [usage.node for usage in after] == ["a", "b"]
    assert [(usage.node, usage.since) for usage in after] == [(usage.node, usage.since) for usage in before]


def test_a_node_that_leaves_and_rubs_out_its_heartbeat_says_when(store: Bucket) -> None:
    _boots(store, "a")
    left = _beats(store, "a") + 500
    store.delete([layout.node("a")])
    usage.note_end(store, "a", left)
    assert usage.read(store, left + 86400)[0].until == left


def test_machines_that_were_there_before_cost_nothing(store: Bucket) -> None:
    store.put(layout.boot_report("mine"), encode(BootReport(node="mine", state="ready")))
    _beats(store, "mine")
    usage.note_end(store, "mine", 5.0)
    forget_nodes(store, of="")
    assert usage.read(store) == []
