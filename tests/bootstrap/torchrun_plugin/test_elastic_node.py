"""Nodes of a run as torchrun's agents have them, as threads of one process, in a folder."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from gpuctl.bootstrap.rendezvous.participant import Attendee
from gpuctl.bootstrap.rendezvous.runs import RunRequest
from gpuctl.bootstrap.torchrun_plugin.elastic_node import ElasticNode, RoundPart
from gpuctl.cluster.errors import BadInput
from gpuctl.cluster.records.rounds import RankExit
from gpuctl.cluster.storage.bucket import open_bucket
from tests.waiting import PATIENCE_S, until

FAILED = RankExit(rank=1, local_rank=0, exit_code=3)


class Nodes:
    """Node N is at 127.0.0.N."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._pool = ThreadPoolExecutor(8)
        self.all: list[ElasticNode] = []

    def new(self, size: tuple[int, int] = (2, 3)) -> ElasticNode:
        number = len(self.all) + 1
        request = RunRequest("exp1", *size, host=f"h{number}")
        attendee = Attendee(request.host, f"127.0.0.{number}")
        self.all.append(ElasticNode(open_bucket(self._url), request, attendee, PATIENCE_S, lambda _: None))
        return self.all[-1]

    def meet(self, *nodes: ElasticNode) -> list[RoundPart]:
        """All of them come for the next round; their parts in it, by rank."""
        found = [coming.result(PATIENCE_S) for coming in [self._pool.submit(node.next_part) for node in nodes]]
        parts = sorted((part for part in found if part is not None), key=lambda part: part.rank)
        assert [part.rank for part in parts] == list(range(len(nodes)))
        assert len({(part.round.number, part.round.master_port) for part in parts}) == 1
        return parts


@pytest.fixture
def nodes(file_url: str) -> Iterator[Nodes]:
    made = Nodes(file_url)
    yield made
    for node in made.all:
        node.take_notice("the test is over")
        node.leave()


def test_a_node_that_comes_ends_the_round_of_the_others_and_all_are_in_the_next(nodes: Nodes) -> None:
    a, b = nodes.new(), nodes.new()
    parts = nodes.meet(a, b)
    assert len(parts[0].round.members) == 2
    assert not a.is_over(0.0)
    c = nodes.new()
    joining = nodes._pool.submit(c.next_part)
    assert a.is_over(PATIENCE_S)
    assert b.is_over(PATIENCE_S)
    later = [nodes._pool.submit(node.next_part) for node in (a, b)]
    found = [coming.result(PATIENCE_S) for coming in (joining, *later)]
    assert {part.rank for part in found if part is not None} == {0, 1, 2}


def test_a_run_has_ended_when_all_are_done_and_not_before(nodes: Nodes) -> None:
    a, b = nodes.new(), nodes.new()
    first, second = nodes.meet(a, b)
    first.ends("completed")
    assert not a.is_over(0.5)
    assert not a.has_ended
    second.ends("completed")
    assert not a.is_over(None)
    assert not b.is_over(None)
    for node in (a, b):
        until(lambda node=node: node.outcome, "an outcome")  # type: ignore[misc]
        assert node.outcome is not None
        assert node.outcome.result == "succeeded"
        assert node.next_part() is None


def test_who_is_done_early_is_needed_again_when_another_leaves(nodes: Nodes) -> None:
    a, b, c = nodes.new(), nodes.new(), nodes.new()
    nodes.meet(a, b, c)
    done, leaving = a, b
    assert done.part is not None
    done.part.ends("completed")
    leaving.take_notice("test")
    leaving.leave()
    assert done.is_over(PATIENCE_S)
    parts = nodes.meet(done, c)
    assert len(parts[0].round.members) == 2


def test_a_node_that_gives_up_ends_the_run_for_all(nodes: Nodes) -> None:
    a, b = nodes.new(), nodes.new()
    _, second = nodes.meet(a, b)
    second.ends("failed", FAILED)
    for node in (a, b):
        until(lambda node=node: node.has_ended, "the end of the run")  # type: ignore[misc]
        assert node.outcome is not None
        assert (node.outcome.result, node.outcome.exit_code) == ("failed", 3)
        assert not node.is_over(0.0)


def test_why_a_node_cannot_stay_is_kept(nodes: Nodes) -> None:
    nodes.meet(nodes.new((1, 1)))
    other = nodes.new((2, 2))
    assert other.next_part() is None
    assert isinstance(other.error, BadInput)
    assert "exp1 is in use with --nodes 1" in str(other.error)
