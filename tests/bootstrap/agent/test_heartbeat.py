"""Heartbeats: of a node that leaves, of one that hangs, and of one whose bucket is away."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpuctl.bootstrap.agent.heartbeat import Heartbeat
from gpuctl.cluster import layout
from gpuctl.cluster.errors import StoreUnavailable
from gpuctl.cluster.records.nodes import NodeRecord, PreemptionNotice
from gpuctl.cluster.storage.bucket import Bucket, open_bucket
from tests.fakes.faults import FaultyStore
from tests.waiting import PATIENCE_S, until

NODE = "node-0"


class Held(Bucket):
    """A bucket in which a write takes as long as the test wants."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self.begun = threading.Event()
        self.go_on = threading.Event()

    def put(self, key: str, data: bytes | memoryview) -> None:
        self.begun.set()
        assert self.go_on.wait(PATIENCE_S)
        self._bucket.put(key, data)


def record(beat: int) -> NodeRecord:
    return NodeRecord(node=NODE, incarnation="i", beat=beat, address="127.0.0.1", port=1)


def test_no_beat_comes_after_the_end_not_even_one_that_was_on_its_way(tmp_path: Path) -> None:
    bucket = open_bucket((tmp_path / "bucket").as_uri())
    held = Held(bucket)
    heart = Heartbeat(held, 60.0, record)
    beating = threading.Thread(target=heart.send)
    beating.start()
    assert held.begun.wait(PATIENCE_S)

    def leave() -> None:
        heart.end()
        bucket.delete([layout.node(NODE)])

    leaving = threading.Thread(target=leave)
    leaving.start()
    leaving.join(0.2)
    assert leaving.is_alive(), "the node was rubbed out under a beat that is on its way"
    held.go_on.set()
    for thread in (beating, leaving):
        thread.join(PATIENCE_S)
    heart.send()
    assert bucket.list(layout.NODES) == []


def test_an_agent_whose_loop_hangs_does_not_look_alive(tmp_path: Path) -> None:
    bucket = open_bucket((tmp_path / "bucket").as_uri())
    asked = threading.Semaphore(0)
    is_well = threading.Event()

    def look() -> bool:
        asked.release()
        return is_well.is_set()

    heart = Heartbeat(bucket, 0.01, record)
    heart.start(look)
    for _ in range(3):
        assert asked.acquire(timeout=PATIENCE_S)
    assert bucket.list(layout.NODES) == []
    is_well.set()
    until(lambda: bucket.list(layout.NODES), "a heartbeat")
    heart.end()


def test_a_heart_beats_on_after_an_outage(tmp_path: Path) -> None:
    store = FaultyStore(open_bucket((tmp_path / "bucket").as_uri()))
    store.trouble("put", "lost", "lost")
    heart = Heartbeat(store, 0.01, record)
    heart.start(lambda: True)
    until(lambda: store.inner.list(layout.NODES), "a heartbeat")
    heart.end()


def test_a_notice_that_did_not_arrive_has_not_been_told(tmp_path: Path) -> None:
    """A node leaves once it has: the others then know that its workers were stopped and have not failed."""
    store = FaultyStore(open_bucket((tmp_path / "bucket").as_uri()))
    notice = PreemptionNotice(lead_s=30.0, at=0.0, source="test")
    noticed: list[PreemptionNotice | None] = [None]
    heart = Heartbeat(store, 60.0, lambda beat: replace(record(beat), notice=noticed[0]))
    heart.send()
    assert not heart.told_of_notice
    noticed[0] = notice
    store.trouble("put", "lost")
    with pytest.raises(StoreUnavailable):
        heart.send()
    assert not heart.told_of_notice
    heart.send()
    assert heart.told_of_notice
