"""Nodes whose bucket is away for longer than a lease.

``tests/e2e/test_mingle_outages.py`` has half a minute of it, with pods that are killed meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from gpuctl.bootstrap.rendezvous.runs import LEASE_S
from gpuctl.bootstrap.rendezvous.session import NotAllHere
from gpuctl.cluster.errors import StoreError
from tests.bootstrap.rendezvous.meeting import Node, Place
from tests.fakes.faults import Proxy, Spoil
from tests.waiting import PATIENCE_S

Away = Callable[[], AbstractContextManager[None]]


@pytest.fixture
def proxy(s3_endpoint: str) -> Iterator[Proxy]:
    with Proxy(s3_endpoint).running() as proxy:
        yield proxy


@pytest.fixture
def place(proxy: Proxy, s3_url: str, s3_endpoint: str) -> Place:
    return Place(s3_url.replace(s3_endpoint, proxy.url))


@pytest.fixture(params=["refuse", pytest.param("hold", marks=pytest.mark.slow)])
def away(request: pytest.FixtureRequest, proxy: Proxy) -> Away:
    """While it lasts, the bucket refuses everything, or does not answer."""
    spoil: Spoil = request.param

    @contextmanager
    def lasting() -> Iterator[None]:
        for method in ("GET", "HEAD", "PUT", "POST", "DELETE"):
            proxy.plan(spoil, method, times=1_000_000)
        yield
        proxy.heal()

    return lasting


def test_who_waits_meets_who_comes_meanwhile(place: Place, away: Away) -> None:
    first = Node(place, "h1", (2, 2))
    first.says("1 of 2 are here")
    with away():
        second = Node(place, "h2", (2, 2))
        for node in (first, second):
            node.says("trying again: ")
    for node in (first, second):
        node.in_round(1, 2).ends()
    for node in (first, second):
        outcome = node.ended.result(PATIENCE_S)
        assert outcome is not None
        assert outcome.result == "succeeded"


def test_what_runs_goes_on_and_what_has_ended_meanwhile_has_ended(place: Place, away: Away) -> None:
    nodes = [Node(place, host, (2, 2)) for host in ("h1", "h2")]
    tasks = [node.in_round(1, 2) for node in nodes]
    with away():
        for node in nodes:
            node.says("trying again: ")
        time.sleep(1.5 * LEASE_S)  # a time without the bucket is what is tested
    time.sleep(LEASE_S)  # and what comes of it afterwards
    assert [node.tasks for node in nodes] == [[task] for task in tasks]
    assert [task.exit for task in tasks] == [None, None]
    with away():
        for task in tasks:
            task.ends()
        nodes[0].says("trying again: ")
    for node in nodes:
        outcome = node.ended.result(PATIENCE_S)
        assert outcome is not None
        assert outcome.result == "succeeded"


def test_who_is_asked_to_leave_while_it_looks_for_the_bucket_leaves(place: Place, away: Away) -> None:
    with away():
        node = Node(place, "h1", (2, 2))
        node.says("trying again: ")
        node.session.take_notice(20.0, "test")
        assert node.ended.result(PATIENCE_S) is None


def test_who_is_asked_to_leave_asks_its_work_to_end_though_the_bucket_is_away(place: Place, away: Away) -> None:
    node = Node(place, "h1", (1, 1))
    task = node.in_round(1, 1)
    with away():
        node.says("trying again: ")
        node.session.take_notice(1000.0, "test")  # nobody waits for the end of that
        assert node.ended.result(PATIENCE_S) is None
        assert task.exit is not None
        assert task.exit.status == "drained"


def test_the_time_to_wait_ends_though_the_bucket_is_away(place: Place, away: Away) -> None:
    with away(), pytest.raises(NotAllHere, match=r"waited 0.1 s: the bucket .* did not answer"):
        Node(place, "h1", (2, 2), timeout_s=0.1).ended.result(PATIENCE_S)


def test_what_runs_goes_on_though_the_bucket_refuses_it_for_a_while(place: Place, proxy: Proxy) -> None:
    node = Node(place, "h1", (1, 1))
    task = node.in_round(1, 1)
    for method in ("GET", "PUT"):
        proxy.plan("refuse", method, times=1_000_000, status=403, code="AccessDenied")
    node.says("trying again: ")
    assert task.exit is None
    proxy.heal()
    task.ends()
    outcome = node.ended.result(PATIENCE_S)
    assert outcome is not None
    assert outcome.result == "succeeded"


def test_a_refusal_where_nothing_runs_is_told_at_once(place: Place, proxy: Proxy) -> None:
    node = Node(place, "h1", (2, 2))
    node.says("1 of 2 are here")
    proxy.plan("refuse", "GET", times=1_000_000, status=403, code="AccessDenied")
    node.session.node.wake()  # type: ignore[union-attr]
    with pytest.raises(StoreError, match="AccessDenied"):
        node.ended.result(PATIENCE_S)
