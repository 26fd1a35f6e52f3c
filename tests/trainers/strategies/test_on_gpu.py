"""The ways of training where the model is on a GPU: streams in the place of threads, and what is kept lies there.

What is drawn on the device (int8's rounding) differs from what a CPU draws; all else comes to the same numbers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gpuctl import DGC, Cast, Compressed, DiLoCo, Int8, LocalSGD, PowerSGD, TopK
from tests.trainers.rank_scripts import fitting_strategies, on_device
from tests.trainers.rank_scripts.checkpointing import same
from tests.trainers.ranks import run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no NVIDIA GPU here")
GPU = {"CUDA_VISIBLE_DEVICES": "0"}
SAME_NUMBERS: list[Any] = [Compressed(TopK(0.1)), Compressed(Cast("bf16")), PowerSGD(2), DGC(0.1)]
METHODS: list[Any] = [*SAME_NUMBERS, Compressed(Int8())]
APART: list[Any] = [LocalSGD(4), DiLoCo(every=7), DiLoCo(every=5, balance="speed"), LocalSGD(5, codec=Int8())]


@pytest.mark.parametrize("strategy", METHODS + APART, ids=repr)
def test_the_trainer_trains_in_a_group_of_nccl(strategy: Any) -> None:
    ((weights, first, last),) = run(1, fitting_strategies.fit, strategy, {"steps": 60}, env=GPU)
    assert last < first / 2
    assert {tensor.device.type for tensor in weights.values()} == {"cuda"}


@pytest.mark.parametrize("strategy", [*METHODS, APART[0], APART[1]], ids=repr)
def test_stopped_and_started_again_it_ends_with_the_same_weights(strategy: Any, tmp_path: Path) -> None:
    options = {"checkpoints": str(tmp_path / "kept"), "checkpoint_every": 7}
    ((expected, _, _),) = run(1, fitting_strategies.fit, strategy, {"steps": 28}, env=GPU)
    run(1, fitting_strategies.fit, strategy, {"steps": 14, **options}, env=GPU)
    ((found, _, _),) = run(1, fitting_strategies.fit, strategy, {"steps": 28, **options}, env=GPU)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-12)


@pytest.mark.parametrize("pause", [0, 20_000_000], ids=["at once", "late"])
@pytest.mark.parametrize("strategy", METHODS, ids=repr)
def test_ranks_exchange_what_a_cpu_would_have_exchanged(strategy: Any, pause: int) -> None:
    """``late``: a step that does not wait for the exchange of its last bucket would step with its own gradients."""
    ours, theirs = run(2, on_device.exchanged, "cuda", strategy, 12, pause, env=GPU)
    assert same(ours, theirs)
    if strategy in SAME_NUMBERS:
        for name, tensor in run(2, on_device.exchanged, "cpu", strategy, 12)[0].items():
            torch.testing.assert_close(ours[name], tensor, rtol=0, atol=1e-6)


@pytest.mark.parametrize("strategy", [LocalSGD(4), DiLoCo(every=7), LocalSGD(5, codec=Int8())], ids=repr)
def test_workers_average_what_a_cpu_would_have_averaged(strategy: Any) -> None:
    steps = 4 * strategy.every
    ours, theirs = run(2, on_device.averaged, "cuda", strategy, steps, env=GPU)
    assert same(ours, theirs)
    if strategy.codec is None:
        for name, tensor in run(2, on_device.averaged, "cpu", strategy, steps)[0].items():
            torch.testing.assert_close(ours[name], tensor, rtol=0, atol=1e-6)
