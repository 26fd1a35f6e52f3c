"""What a node that waits costs, counted at a real S3 server, and that it is quick all the same."""

from __future__ import annotations

import re
import secrets
import threading
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from gpuctl.bootstrap.rendezvous import participant
from gpuctl.bootstrap.rendezvous.command import Meeting
from gpuctl.bootstrap.rendezvous.participant import Attendee, Begin, Participant
from gpuctl.bootstrap.rendezvous.runs import RunRequest, join
from gpuctl.cluster.clock import Clock, SystemClock
from gpuctl.cluster.storage.bucket import open_bucket
from tests.bootstrap.rendezvous.meeting import Task
from tests.fakes.faults import Proxy
from tests.fakes.stores import s3
from tests.waiting import until

WRITE_OR_LIST_USD, READ_USD = 0.005 / 1000, 0.0004 / 1000
"""S3 Standard, us-east-1, requests (aws.amazon.com/s3/pricing)."""
TURNS = int(60 / participant._WAITING_BEAT_S)
"""A minute of waiting: so many turns, and heartbeats, for each node."""


@pytest.fixture
def proxy(s3_endpoint: str) -> Iterator[Proxy]:
    with Proxy(s3_endpoint).running() as proxy:
        yield proxy


class Waiting:
    """Nodes that wait for one more than there are. ``minute`` is a minute of each, without the waiting."""

    def __init__(self, proxy: Proxy, endpoint: str, nodes: int, begin: Begin | None = None) -> None:
        """``begin``: what they do in a round; by default nothing, which ends at once."""
        self.proxy = proxy
        self._begin = begin or (lambda round_, rank, _: Meeting(round_, rank, SystemClock()))
        bucket = f"waiting-{secrets.token_hex(4)}"
        s3.create(endpoint, bucket)
        self.url = s3.url(proxy.url, bucket)
        self.nodes = [self.come(nodes + 1, number) for number in range(nodes)]
        for node in self.nodes * 3:  # they have met
            turn(node)
        until(lambda: all(len(turn(node).here) == nodes for node in self.nodes), "all to know of each other")

    def come(self, size: int, number: int, least: int | None = None, clock: Clock | None = None) -> Participant:
        clock = clock or SystemClock()
        run = join(open_bucket(self.url), RunRequest("exp1", least or size, size), clock, lambda _: None)
        node = Participant(run, Attendee(f"h{number}", "127.0.0.1"), self._begin, clock, lambda _: None)
        node.arrive()
        return node

    def minute(self, node: Participant, others: list[Participant]) -> Counter[str]:
        """The requests of one node, while the others beat as well."""
        found: Counter[str] = Counter()
        for _ in range(TURNS):
            for other in others:
                other._heartbeat.send()
            since = len(self.proxy.seen)
            node._heartbeat.send()
            turn(node)
            found.update(_kind(request) for request in self.proxy.seen[since:])
        return found

    def leave(self) -> None:
        for node in self.nodes:
            node.leave()


class Leaping(SystemClock):
    """Can be put ahead, and counts how often the thread of a heartbeat has asked for the time."""

    ahead_s = 0.0
    asked = 0

    def monotonic(self) -> float:
        if threading.current_thread().name == "heartbeat":
            self.asked += 1
        return super().monotonic() + self.ahead_s


def turn(node: Participant) -> Participant:
    node.wake()
    node.turn()
    return node


def _kind(request: str) -> str:
    return "list" if "list-type=2" in request else request.split()[0].lower()


def _usd_an_hour(minute: Counter[str]) -> float:
    return 60 * (WRITE_OR_LIST_USD * (minute["put"] + minute["list"]) + READ_USD * minute["get"])


def test_an_hour_of_waiting_costs_less_than_a_cent_and_requests_grow_as_the_nodes(
    proxy: Proxy, s3_endpoint: str
) -> None:
    for nodes in (2, 4):
        waiting = Waiting(proxy, s3_endpoint, nodes)
        (leader,) = [node for node in waiting.nodes if node._mingle.leads]
        followers = [node for node in waiting.nodes if node is not leader]
        of_leader = waiting.minute(leader, followers)
        of_follower = waiting.minute(followers[0], [])
        waiting.leave()
        # As docs/guides/mingle.md has them.
        assert of_leader["put"] == of_follower["put"] == 6
        assert of_leader["list"] <= 13
        assert of_leader["get"] <= 12 + 6 * (nodes - 1)
        assert of_follower["list"] <= 1
        assert of_follower["get"] <= 12
        assert {*of_leader, *of_follower} <= {"put", "list", "get"}
        assert _usd_an_hour(of_leader) < 0.01
        assert _usd_an_hour(of_follower) < 0.005


def test_a_node_that_waits_beats_seldom_and_one_that_works_every_second(proxy: Proxy, s3_endpoint: str) -> None:
    waiting = Waiting(proxy, s3_endpoint, 1, begin=lambda round_, rank, on_end: Task(round_, rank, on_end))
    (node,) = waiting.nodes
    assert (node._heartbeat._every_s, node._record().lease_s) == (10.0, 30.0)
    other = waiting.come(2, 1)
    until(lambda: [turn(one).work for one in (other, node)][1], "a round")
    assert (node._heartbeat._every_s, node._record().lease_s) == (1.0, 0.0)
    since = len(proxy.seen)
    beat = f"PUT .*/nodes/{node.node}"
    until(lambda: len([seen for seen in proxy.seen[since:] if re.match(beat, seen)]) >= 3, "beats, by themselves")
    other.leave()
    waiting.leave()


def test_a_node_whose_loop_hangs_does_not_look_alive(proxy: Proxy, s3_endpoint: str) -> None:
    clock = Leaping()
    waiting = Waiting(proxy, s3_endpoint, 0)
    node = waiting.come(2, 0, clock=clock)  # and takes no turn

    def beats() -> int:
        return len([seen for seen in proxy.seen if re.match(f"PUT .*/nodes/{node.node}", seen)])

    node._heartbeat.pace(0.01)
    until(lambda: beats() > 3, "beats, by themselves")
    clock.ahead_s = 1000.0
    last, asked = beats() + 1, clock.asked  # one may be on its way
    until(lambda: clock.asked > asked + 3 or beats() > last, "its heart to stop, or to go on")
    assert beats() <= last
    node.leave()


@pytest.mark.parametrize("room", [0, 1], ids=["all have come", "one more could come"])
def test_who_comes_is_known_at_once_although_nodes_that_wait_look_seldom(
    proxy: Proxy, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    monkeypatch.setattr(participant, "_WAITING_BEAT_S", 1000.0)  # whoever waits for a beat waits for ever
    monkeypatch.setattr(participant, "_WAITING_LEASE_S", 3000.0)
    waiting = Waiting(proxy, s3_endpoint, 0)
    over = threading.Event()
    threads = []
    nodes: list[Participant] = []

    def stay(node: Participant) -> None:
        while not over.is_set() and node.outcome() is None:
            node.turn(at_most_s=1000.0)

    for number in range(3):
        node = waiting.come(3 + room, number, least=3)
        nodes.append(node)
        threads.append(threading.Thread(target=stay, args=(node,), daemon=True))
        threads[-1].start()
        time.sleep(0.3)  # the first have nothing to do any more
    until(lambda: all(node.was_in_a_round for node in nodes), "a round of all")
    until(lambda: all(node.outcome() is not None for node in nodes), "its end to be known to all")
    over.set()
    for node, thread in zip(nodes, threads, strict=True):
        node.wake()
        thread.join()
        node.leave()
