"""PowerSGD over four real ranks, beside torch's own hook."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gpuctl import PowerSGD
from gpuctl.cluster.errors import BadInput
from gpuctl.trainers.strategies.gradient.powersgd import matrix_shape, most_rank, orthogonalized
from tests.trainers import ranks
from tests.trainers.rank_scripts import exchanging


def test_it_is_torchs_own_from_its_second_step_on() -> None:
    """torch's hook begins after two exact steps, with a Q that it draws itself; given that, each step is the same."""
    ours, theirs = ranks.run(4, exchanging.beside_torchs_powersgd, 3, 6)[1]
    assert len(ours) == len(theirs) == 6
    for step, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        for name in one:
            assert torch.allclose(one[name], other[name], rtol=0, atol=1e-13), (step, name)
    assert not torch.equal(ours[0]["0.weight"], ours[1]["0.weight"])


def test_a_mean_of_that_rank_or_less_is_exact() -> None:
    """Each rank's gradients are of the rank that its batch has samples, so with one sample a rank, four are enough."""
    out, mean = ranks.run(4, exchanging.of_low_rank, PowerSGD(4))[2]
    assert torch.allclose(out, mean, rtol=0, atol=1e-13)
    short, mean = ranks.run(4, exchanging.of_low_rank, PowerSGD(3))[2]
    assert (short - mean).abs().max() > 1e-4, "three are not"


def test_full_rank_is_exact() -> None:
    """By the algorithm: P spans all rows there are. (A parameter for which nothing would be won is exact anyway.)"""
    torch.manual_seed(0)
    m, q = torch.randn(6, 40, dtype=torch.float64), torch.randn(40, 6, dtype=torch.float64)
    (p,) = orthogonalized([m @ q])
    assert torch.allclose(p @ (m.T @ p).T, m, rtol=0, atol=1e-12)
    assert most_rank(6, 40) == 5


def test_the_mean_of_what_is_left_is_what_the_approximation_lacks() -> None:
    told = ranks.run(4, exchanging.gradients, PowerSGD(2), 3)
    for step in range(3):
        own = torch.stack([of_rank[step]["own"]["0.weight"].reshape(-1) for of_rank in told]).mean(0)
        out = told[0][step]["out"]["0.weight"].reshape(-1)
        assert all(torch.equal(of_rank[step]["out"]["0.weight"].reshape(-1), out) for of_rank in told)
        left = [
            torch.stack([of_rank[at]["residual"]["0.weight"] for of_rank in told]).mean(0) if at >= 0 else 0
            for at in (step - 1, step)
        ]
        assert (own + left[0] - out - left[1]).abs().max() < 1e-14
    assert set(told[0][0]["residual"]) == {"0.weight", "2.weight"}


def test_factors_find_their_parameters_in_other_buckets() -> None:
    """A run that goes on after a restart, whose buckets are others, is the run that was not restarted."""
    whole, resumed = ranks.run(2, exchanging.restarted, PowerSGD(2), 4)[0]
    for name in whole:
        assert torch.allclose(whole[name], resumed[name], rtol=0, atol=1e-14), name


def test_another_rank_keeps_the_residuals_and_begins_anew() -> None:
    left, mean = ranks.run(2, exchanging.saved, PowerSGD(2), 2)[0]
    told = ranks.run(2, exchanging.loaded, PowerSGD(3), left)[0]
    assert told["q"] == {}
    assert all(torch.allclose(told["residual"][name], mean[name], rtol=0, atol=1e-16) for name in mean)


def test_the_loss_of_a_rank_keeps_the_mean_residual() -> None:
    left, mean = ranks.run(4, exchanging.saved, PowerSGD(2), 2)[3]
    for of_rank in ranks.run(3, exchanging.loaded, PowerSGD(2), left):
        for name in mean:
            assert torch.allclose(of_rank["residual"][name], mean[name], rtol=0, atol=1e-16)
            assert torch.equal(of_rank["q"][name], left["q"][name])


def test_a_kernel_is_a_matrix_with_a_row_for_each_channel() -> None:
    assert matrix_shape(torch.empty(8, 3, 5, 5)) == (8, 75)


def test_no_gradient_at_all_is_no_reason_to_stop() -> None:
    assert ranks.run(2, exchanging.of_zeros, PowerSGD(2))[0] == 0.0


@pytest.mark.parametrize("rank", [0, -1, 1.5, "four"])
def test_a_rank_that_is_none_is_refused(rank: Any) -> None:
    with pytest.raises(BadInput, match="rank must be a whole number of at least 1"):
        PowerSGD(rank)


def test_a_rank_above_every_matrix_is_refused() -> None:
    said = ranks.run(2, exchanging.refused_optimizer, PowerSGD(64), None)[0]
    assert said == "rank 64 is too large for every matrix of the model: nothing would be won; use a rank of at most 38"
