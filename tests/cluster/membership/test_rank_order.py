"""Who has which rank where people have chosen some."""

from __future__ import annotations

import pytest

from gpuctl.cluster.membership.rank_order import in_rank_order, rank_clash
from gpuctl.cluster.records.nodes import NodeRecord


def nodes(*chosen: int | None) -> list[NodeRecord]:
    """Named a, b, … in this order, each with the rank that it has chosen."""
    return [
        NodeRecord(node="abcdef"[at], incarnation="1", beat=1, address=f"10.0.0.{at}", port=1, rank=rank)
        for at, rank in enumerate(chosen)
    ]


@pytest.mark.parametrize(
    ("chosen", "size", "ranked"),
    [
        ((None, None, None), 3, "abc"),
        ((2, 0, 1), 3, "bca"),
        ((None, 0, None), 3, "bac"),
        ((None, None, 0, 1), 4, "cdab"),
        ((None, None, None, 1), 3, "adb"),
        ((1, None), 2, "ba"),
        ((2, None), 3, "ba"),
        ((5, None, None), 2, "ab"),
    ],
)
def test_who_has_chosen_a_rank_has_it_and_the_others_fill_the_gaps(
    chosen: tuple[int | None, ...], size: int, ranked: str
) -> None:
    assert "".join(node.node for node in in_rank_order(nodes(*chosen), size)) == ranked


def test_of_two_with_one_rank_both_hosts_are_named() -> None:
    assert rank_clash(nodes(0, 1, None, None)) == ""
    assert rank_clash(nodes(0, 1, 1, None)) == "rank 1 was chosen on b (10.0.0.1) and on c (10.0.0.2)"
