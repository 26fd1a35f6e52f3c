"""The order in which pairs are measured. The measurement itself is in ``tests/e2e/test_verify.py``."""

from __future__ import annotations

import itertools

import pytest

from gpuctl.trainers.bandwidth import schedule


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
