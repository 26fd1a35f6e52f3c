"""The order in which pairs are measured, and one rank's measurement. Of several: ``tests/e2e/test_verify.py``."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from gpuctl.trainers.diagnostics.bandwidth import measure, schedule


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 5, 8, 9, 16, 17])
@pytest.mark.parametrize("together", [False, True])
def test_every_two_nodes_meet_once_and_no_node_is_in_two_matches_of_a_turn(nodes: int, together: bool) -> None:
    turns = schedule(nodes, together)
    matches = [match for turn in turns for match in turn]
    assert sorted(matches) == list(itertools.combinations(range(nodes), 2))
    for turn in turns:
        players = [node for match in turn for node in match]
        assert len(players) == len(set(players))


def test_together_takes_as_many_turns_as_a_tournament() -> None:
    assert len(schedule(16, together=True)) == 15
    assert len(schedule(9, together=True)) == 9
    assert len(schedule(4, together=False)) == 6


@pytest.fixture
def world(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("world")
def test_a_sum_that_is_none_is_noticed() -> None:
    cpu = torch.device("cpu")
    right = measure(None, ["a"], 1, 4096, cpu)
    assert (right.bytes, right.ranks, right.wrong, right.trouble) == (4096, 1, False, "") and right.seconds > 0
    assert measure(None, ["a"], 2, 4096, cpu).wrong, "one rank's ones are no sum of two"


def test_an_all_reduce_that_breaks_off_is_told_and_not_raised() -> None:
    class Broken:
        """As gloo is when the other one has gone."""

        def allreduce(self, *_: object) -> None:
            raise RuntimeError("Connection closed by peer [10.0.0.5]:4711\nThis may indicate a network failure")

    measured = measure(Broken(), ["a", "b"], 2, 4096, torch.device("cpu"))  # type: ignore[arg-type]
    assert measured.trouble == "Connection closed by peer [10.0.0.5]:4711" and not measured.seconds
