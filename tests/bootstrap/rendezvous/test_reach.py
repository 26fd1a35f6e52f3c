"""Whether the nodes of a run reach each other at the addresses that they have told."""

from __future__ import annotations

import socket

import pytest

from gpuctl.bootstrap.rendezvous.reach import ReachWatch, write_interfaces
from gpuctl.cluster.records.nodes import NodeRecord
from gpuctl.cluster.storage.bucket import Bucket, open_bucket
from tests.fakes.clock import HandClock
from tests.waiting import until


class Watch:
    """Of node a, which looks at node b: at an address of this machine, where nobody may listen."""

    def __init__(self, store: Bucket) -> None:
        with socket.create_server(("127.0.0.1", 0)) as closed:
            self.port = closed.getsockname()[1]
        self.b = NodeRecord(node="b", incarnation="1", beat=1, address="127.0.0.1", port=self.port, host="pod-b")
        self.clock = HandClock()
        self.news: list[int] = []
        self.watch = ReachWatch(store, self.clock, "a", lambda: self.news.append(1))
        write_interfaces(store, self.b)

    def trouble(self) -> list[str]:
        return self.watch.trouble([self.b])


@pytest.fixture
def watch(file_url: str) -> Watch:
    return Watch(open_bucket(file_url))


def test_what_cannot_be_reached_is_told_with_the_addresses_that_there_are(watch: Watch) -> None:
    (told,) = until(watch.trouble, "what cannot be reached")
    assert told.startswith(f"pod-b cannot be reached at 127.0.0.1, port {watch.port} (refused); it has ")
    assert "lo (127.0.0.1)" in told
    assert told.endswith(": choose one there with --interface")
    assert watch.news == [1]
    assert watch.watch.trouble([]) == [], "not of one that has left"


def test_it_is_looked_at_again_a_while_later(watch: Watch) -> None:
    until(watch.trouble, "what cannot be reached")
    with socket.create_server(("127.0.0.1", watch.port)):
        watch.clock.now += 60
        until(lambda: not watch.trouble(), "it to be reached")
        assert watch.news == [1, 1]
    watch.clock.now += 60
    assert watch.trouble() == [], "what was reached once is not looked at again: its heartbeat tells that it lives"


def test_a_node_does_not_look_at_itself(watch: Watch) -> None:
    me = NodeRecord(node="a", incarnation="1", beat=1, address="127.0.0.1", port=watch.port)
    assert watch.watch.trouble([me]) == []
    assert watch.watch._thread is None
