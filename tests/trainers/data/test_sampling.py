"""The order of samples: a function of (seed, step), whatever the world."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpuctl.cluster.errors import BadInput
from gpuctl.trainers.data.sampling import Sampling, mixed, slice_of

SIZES = st.integers(1, 40).flatmap(lambda samples: st.tuples(st.just(samples), st.integers(1, samples)))


@given(SIZES, st.integers(0, 2**40), st.lists(st.integers(0, 200), min_size=1, max_size=8), st.integers(1, 9))
def test_the_ranks_of_any_world_share_out_the_same_batch(
    sizes: tuple[int, int], seed: int, steps: list[int], world: int
) -> None:
    ours = Sampling(*sizes, seed)
    for step in steps:  # in any order, and again
        slices = [ours.slice(step, rank, world) for rank in range(world)]
        assert torch.equal(torch.cat(slices), Sampling(*sizes, seed).batch(step))
        lengths = [len(part) for part in slices]
        assert max(lengths) - min(lengths) <= 1


@given(SIZES, st.integers(0, 2**40), st.integers(0, 5))
def test_an_epoch_takes_no_sample_twice_and_drops_less_than_a_batch(
    sizes: tuple[int, int], seed: int, epoch: int
) -> None:
    samples, batch = sizes
    ours = Sampling(samples, batch, seed)
    first = epoch * ours.per_epoch
    taken = torch.cat([ours.batch(first + place) for place in range(ours.per_epoch)]).tolist()
    assert len(set(taken)) == len(taken) == samples - samples % batch
    assert set(taken) <= set(range(samples))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = [Sampling(1000, 1000, seed).batch(epoch).tolist() for seed in range(3) for epoch in range(3)]
    assert len({tuple(order) for order in orders}) == 9


def test_the_order_never_changes_between_versions() -> None:
    """A run that is resumed with a newer gpuctl meets the samples it would have met."""
    assert Sampling(10, 5, seed=3).batch(7).tolist() == [4, 6, 1, 7, 8]


@given(st.integers(0, 1000), st.integers(1, 50))
def test_slices_meet_end_to_end(length: int, world: int) -> None:
    bounds = [slice_of(length, rank, world) for rank in range(world)]
    assert [begin for begin, _ in bounds] == [0, *(end for _, end in bounds[:-1])]
    assert bounds[-1][1] == length


@given(st.lists(st.integers(0, 2**63), min_size=1, max_size=3), st.integers(0, 2))
def test_every_number_counts_in_a_seed(numbers: list[int], which: int) -> None:
    other = list(numbers)
    other[which % len(numbers)] += 1
    assert mixed(*numbers) != mixed(*other)
    assert 0 <= mixed(*numbers) < 2**63


@pytest.mark.parametrize("batch", [0, -1, 11])
def test_a_batch_that_does_not_fit_is_refused_with_what_would(batch: int) -> None:
    with pytest.raises(BadInput, match=rf"global_batch={batch} does not fit .* 10 samples; use 1 to 10"):
        Sampling(10, batch, 0)
