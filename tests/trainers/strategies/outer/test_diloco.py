from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from gpuctl import Cast, DiLoCo, Int8, LocalSGD
from tests.trainers.rank_scripts import training_apart
from tests.trainers.ranks import run


def close(found: dict[str, Any], expected: dict[str, Any], atol: float = 1e-12) -> bool:
    return found.keys() == expected.keys() and all(np.allclose(found[n], expected[n], 0, atol) for n in found)


def test_five_outer_steps_are_those_of_the_paper() -> None:
    told = run(3, training_apart.trained, DiLoCo(every=4), 20)
    expected = training_apart.by_the_paper(3, 4, 20, 0.7, 0.9)
    assert len(expected) == 5
    for found in told:
        assert len(found) == 5
        assert all(close(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
    assert not close(expected[-1], training_apart.by_the_paper(3, 4, 20, 0.7, 0.8)[-1], 1e-3)


def test_the_last_outer_step_may_be_shorter_and_the_first_ones_of_one_step() -> None:
    told = run(2, training_apart.trained, DiLoCo(every=4, rate=0.5, momentum=0.6, warmup_steps=3), 13)
    expected = training_apart.by_the_paper(2, 4, 13, 0.5, 0.6, warmup=3)
    assert [len(found) for found in told] == [len(expected)] * 2 == [6, 6]
    assert all(close(ours, theirs) for ours, theirs in zip(told[0], expected, strict=True))


def test_at_rate_one_without_momentum_it_is_the_mean_of_the_weights() -> None:
    diloco = run(2, training_apart.trained, DiLoCo(every=1, rate=1.0, momentum=0.0), 6)
    local_sgd = run(2, training_apart.trained, LocalSGD(1), 6)
    assert all(close(ours, theirs, 1e-15) for ours, theirs in zip(diloco[0], local_sgd[0], strict=True))


def test_one_worker_at_rate_one_without_momentum_trains_plainly() -> None:
    (found,) = run(1, training_apart.trained, DiLoCo(every=5, rate=1.0, momentum=0.0), 10)
    expected = training_apart.by_the_paper(1, 1, 10, 1.0, 0.0)
    assert close(found[-1], expected[-1])


def test_the_outer_optimizer_is_torchs_sgd() -> None:
    (found,) = run(1, training_apart.trained, DiLoCo(every=3, rate=0.3, momentum=0.8), 12)
    theta = torch.nn.Parameter(torch.from_numpy(training_apart.weights(training_apart.net())["weight"]))
    outer = torch.optim.SGD([theta], 0.3, momentum=0.8, nesterov=True)
    model = training_apart.net()
    inner = torch.optim.SGD(model.parameters(), training_apart.RATE)
    bias = model.bias
    before = bias.detach().clone()
    outer_bias = torch.nn.Parameter(before.clone())
    outer.add_param_group({"params": [outer_bias]})
    for step in range(12):
        training_apart.descend(model, inner, (step, 0))
        if (step + 1) % 3 == 0:
            theta.grad, outer_bias.grad = (theta - model.weight).detach(), (outer_bias - bias).detach()
            outer.step()
            with torch.no_grad():
                model.weight.copy_(theta)
                bias.copy_(outer_bias)
    assert close(found[-1], training_apart.weights(model))


@pytest.mark.parametrize(
    ("codec", "part"), [(None, 1.0), (Cast("bf16"), 0.5), (Int8(), 0.2539)], ids=["fp32", "bf16", "int8"]
)
def test_each_outer_step_sends_one_dense_exchange_or_less(codec: Any, part: float) -> None:
    steps, every = 20, 5
    ours, dense = run(2, training_apart.bytes_sent, DiLoCo(every=every, codec=codec), steps, 100_000)[0]
    assert ours / dense == pytest.approx(part / every, rel=0.02)


@pytest.mark.parametrize(("codec", "atol"), [(Cast("bf16"), 0.02), (Int8(16), 0.02)], ids=["bf16", "int8"])
def test_a_codec_changes_little_and_nothing_between_workers(codec: Any, atol: float) -> None:
    told = run(2, training_apart.trained, DiLoCo(every=4, codec=codec), 20)
    expected = training_apart.by_the_paper(2, 4, 20, 0.7, 0.9)[-1]
    for name, found in told[0][-1].items():
        assert (found == told[1][-1][name]).all()
        assert not np.array_equal(found, expected[name])
        assert np.allclose(found, expected[name], 0, atol)


def test_narrow_weights_are_kept_in_32_bits_between_outer_steps() -> None:
    """In bfloat16 an outer step of less than half a unit would change nothing, and the next ones neither."""
    narrow, wide = (
        run(1, training_apart.trained, DiLoCo(every=1, rate=0.01, momentum=0.0), 30, dtype)[0][-1]["weight"]
        for dtype in (torch.bfloat16, torch.float64)
    )
    moved = np.linalg.norm(wide - training_apart.weights(training_apart.net())["weight"])
    assert np.linalg.norm(narrow - wide) < 0.3 * moved


def test_what_was_not_learned_does_not_come_back_as_a_gradient() -> None:
    """What is lost where θ becomes a narrow weight is no part of what the worker learns from there on."""
    (found,) = run(1, training_apart.learned_once, 5)
    assert found == [pytest.approx(1 - 0.35 * 2**-7, abs=1e-7)] * 5
