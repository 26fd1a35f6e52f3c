"""How the bytes of a save that DCP has planned are dealt out."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.planner import SavePlan

from gpuctl.trainers.checkpoint.dcp.partition import SHARED_BYTES, assign, held, ranges_of

WORLD = 4


@st.composite
def states(draw: st.DrawFn) -> list[dict[str, torch.Tensor]]:
    """Of each rank. No tensor has memory."""
    found: list[dict[str, torch.Tensor]] = [{} for _ in range(WORLD)]
    for number in range(draw(st.integers(1, 12))):
        size = draw(st.sampled_from([0, 1, 1000, SHARED_BYTES // 4, SHARED_BYTES // 4 + 1, SHARED_BYTES, 7_654_321]))
        holders = draw(st.sampled_from([range(WORLD), range(WORLD), (0, 1), (2, 3), (1, 2, 3), (2,)]))
        for rank in holders:
            found[rank][f"t{number}"] = torch.empty(size, device="meta")
    return found


def planned(ranks: list[dict[str, torch.Tensor]]) -> tuple[list[SavePlan], list[SavePlan]]:
    """Each rank's own plan, and what becomes of it if the first rank that holds a tensor writes it."""
    plans = [create_default_local_save_plan(dict(state), rank == 0) for rank, state in enumerate(ranks)]
    seen: set[str] = set()
    alone = []
    for plan in plans:
        alone.append(dataclasses.replace(plan, items=[item for item in plan.items if item.index.fqn not in seen]))
        seen |= {item.index.fqn for item in plan.items}
    return plans, alone


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(states())
def test_every_byte_is_written_once_by_a_rank_that_holds_it(ranks: list[dict[str, torch.Tensor]]) -> None:
    plans, alone = planned(ranks)
    spans: dict[str, list[tuple[int, int]]] = {}
    for rank, (plan, assignment) in enumerate(zip(alone, assign(alone, [held(plan) for plan in plans]), strict=True)):
        for item_range in ranges_of(plan, assignment):
            name = item_range.item.index.fqn
            assert name in ranks[rank]
            assert item_range.low % 64 == 0
            spans.setdefault(name, []).append((item_range.low, item_range.high))
    for name, tensor in {name: tensor for state in ranks for name, tensor in state.items()}.items():
        covered = sorted(spans[name])
        assert [low for low, _ in covered] == [0, *(high for _, high in covered[:-1])], name
        assert covered[-1][1] == tensor.nbytes, name


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 3_000_000), min_size=1, max_size=12))
def test_what_all_hold_is_shared_evenly_but_for_what_is_small(sizes: list[int]) -> None:
    ranks = [
        {f"t{number}": torch.empty(size, device="meta") for number, size in enumerate(sizes)} for _ in range(WORLD)
    ]
    plans, alone = planned(ranks)
    assignment = assign(alone, [held(plan) for plan in plans])
    loads = [
        sum(item_range.high - item_range.low for item_range in ranges_of(plan, of))
        for plan, of in zip(alone, assignment, strict=True)
    ]
    small = sum(4 * size for size in sizes if 4 * size < SHARED_BYTES)
    assert max(loads) - min(loads) <= max(small, 128), "a cut is moved by less than 64 bytes"
    if sum(loads) >= WORLD * small:
        assert max(loads) - min(loads) <= 128, "rank 0 has all that is small, and less of the rest"


def test_a_plan_of_which_nobody_knows_who_else_holds_it_stays_as_it_is() -> None:
    _, alone = planned([{"t": torch.empty(SHARED_BYTES, device="meta")} for _ in range(WORLD)])
    assignment = assign(alone, [() for _ in alone])
    assert [len(ranges_of(plan, of)) for plan, of in zip(alone, assignment, strict=True)] == [1, 0, 0, 0]
