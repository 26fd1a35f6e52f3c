"""What collectives over gloo send, beside the formulas and the figures of ``docs/concepts/collectives.md``."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.paths import ROOT
from tests.trainers import ranks
from tests.trainers.rank_scripts.collectives import sent_and_differing, summed

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts what a socket carries")

N, S = 4, 4_000_000
ALL_REDUCE = 2 * (N - 1) / N * S
FORMULAS = {
    "all-reduce": [ALL_REDUCE] * N,
    "reduce-scatter": [ALL_REDUCE] * N,  # gloo's: an all-reduce of which each rank keeps its part
    "all-gather": [(N - 1) / N * S] * N,
    "all-to-all": [(N - 1) / N * S] * N,
    "broadcast": [2 * S, S, 0, 0],  # gloo's: a binomial tree from rank 0
    "ring all-reduce": [ALL_REDUCE] * N,
    "its first half": [(N - 1) / N * S] * N,
    "whole-tensor ring": [(N - 1) * S] * N,
}
"""Bytes that each rank sends."""
PAGE = (ROOT / "docs/concepts/collectives.md").read_text()


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    """By collective: what each rank sent, and the share of elements that are not alike on all ranks."""
    by_rank = ranks.run(N, sent_and_differing, S)
    return {name: ([told[name][0] for told in by_rank], by_rank[0][name][1]) for name in by_rank[0]}


@pytest.mark.parametrize("collective", FORMULAS)
def test_a_collective_sends_what_its_formula_says(measured: dict[str, Any], collective: str) -> None:
    assert measured[collective][0] == pytest.approx(FORMULAS[collective], rel=0.02, abs=20_000)


def test_the_page_shows_what_is_measured(measured: dict[str, Any]) -> None:
    shown = re.findall(
        r"^([a-z][a-z -]+?) +(\d+\.\d) +(\d+\.\d) +(\d+\.\d) +(\d+\.\d)(?: +(\d+)% of)?", PAGE, re.MULTILINE
    )
    assert {row[0] for row in shown} == measured.keys() == FORMULAS.keys()
    for name, *megabytes, percent in shown:
        sent, differing = measured[name]
        # The page is about 16 MB.
        assert [float(one) for one in megabytes] == pytest.approx([16 * one / S for one in sent], rel=0.02, abs=0.05)
        assert not percent or int(percent) / 100 == pytest.approx(differing, abs=0.02)


def test_the_page_draws_each_step_of_the_ring() -> None:
    drawn = re.findall(r"^  rank \d +(\S+) +(\S+) +(\S+) +(\S+)$", PAGE, re.MULTILINE)
    assert [[*row] for row in drawn] == [row for state in ring_states() for row in state]


def ring_states() -> Iterator[list[list[str]]]:
    """What each rank holds before and after each step; what has just come in brackets."""

    def shown(new: int) -> list[list[str]]:
        """``new``: which chunk is new on rank 0; on rank 1 it is the next one."""
        return [[f"[{held[r][c]}]" if c == (r + new) % N else str(held[r][c]) for c in range(N)] for r in range(N)]

    held = [[(chunk + 1) * 10**rank for chunk in range(N)] for rank in range(N)]
    yield [[str(one) for one in row] for row in held]
    for step in range(N - 1):
        came = [held[rank - 1][(rank - step - 1) % N] for rank in range(N)]
        for rank in range(N):
            held[rank][(rank - step - 1) % N] += came[rank]
        yield shown(-step - 1)
    for step in range(N - 1):
        came = [held[rank - 1][(rank - step) % N] for rank in range(N)]
        for rank in range(N):
            held[rank][(rank - step) % N] = came[rank]
        yield shown(-step)
    assert held == [[1111, 2222, 3333, 4444]] * N


@pytest.mark.parametrize("collective", ["all-reduce", "ring all-reduce"])
def test_a_ring_of_chunks_ends_with_the_same_bits_on_all_ranks(measured: dict[str, Any], collective: str) -> None:
    assert measured[collective][1] == 0


def test_a_ring_of_whole_tensors_ends_with_other_bits_on_each_rank(measured: dict[str, Any]) -> None:
    assert measured["whole-tensor ring"][1] > 0.5


def test_both_rings_sum_and_only_the_one_of_chunks_gives_all_ranks_the_same() -> None:
    """The page's numbers, which float32 cannot add in every order; their sum is 2."""
    told = ranks.run(N, summed, [[1e8] * N, [1.0] * N, [-1e8] * N, [1.0] * N])
    assert [whole for _, whole in told] == [[1.0] * N, [0.0] * N, [1.0] * N, [0.0] * N]
    assert all(chunks == told[0][0] for chunks, _ in told)
    small = [[1.0, 2.0, 3.0, 4.0, 5.0]] * 3  # not divisible by the number of ranks
    assert ranks.run(3, summed, small) == [([3.0, 6.0, 9.0, 12.0, 15.0],) * 2] * 3
