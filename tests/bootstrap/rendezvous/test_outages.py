"""Nodes whose bucket is away for longer than a lease.

``tests/e2e/test_mingle_outages.py`` has half a minute of it, with pods that are killed meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from gpuctl.bootstrap.rendezvous.runs import LEASE_S
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
