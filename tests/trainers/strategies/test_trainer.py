"""``Trainer`` with strategies: what is the same for every world, what a checkpoint carries on, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from gpuctl import DGC, Cast, Compressed, DiLoCo, Int8, LocalSGD, PowerSGD, TopK, Trainer
from gpuctl.cluster.errors import BadInput
from tests.trainers.rank_scripts import fitting, fitting_strategies
from tests.trainers.rank_scripts.checkpointing import same
from tests.trainers.ranks import Ranks, run

METHODS: list[Any] = [Compressed(TopK(0.1)), Compressed(Int8()), Compressed(Cast("bf16")), PowerSGD(2), DGC(0.1)]
APART: list[Any] = [LocalSGD(4), DiLoCo(every=7), DiLoCo(every=5, balance="speed"), LocalSGD(5, inner="each")]


@pytest.mark.parametrize("strategy", METHODS + APART, ids=repr)
@pytest.mark.parametrize("world", [1, 2])
def test_it_trains_and_all_ranks_end_with_the_same_weights(strategy: Any, world: int) -> None:
    told = run(world, fitting_strategies.fit, strategy, {"steps": 60})
    for weights, first, last in told:
        assert last < first / 2
        assert same(weights, told[0][0])


@pytest.mark.parametrize("strategy", [Compressed(TopK(1)), DGC(1.0, momentum=0.0)], ids=repr)
def test_sent_whole_the_losses_are_those_of_the_exact_mean(strategy: Any) -> None:
    exact = run(2, fitting_strategies.fit, None, {"steps": 6})[0][0]
    for name, found in run(2, fitting_strategies.fit, strategy, {"steps": 6})[0][0].items():
        torch.testing.assert_close(found, exact[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("batch", [12, 7])
def test_a_mean_of_weights_after_every_step_of_sgd_is_the_exact_mean(batch: int) -> None:
    """Also of unlike slices: a worker weighs as much as its samples."""
    options = {"steps": 6, "global_batch": batch}
    exact = run(2, fitting_strategies.fit, None, options)[0][0]
    for found, _, _ in run(2, fitting_strategies.fit, LocalSGD(1), options):
        for name in exact:
            torch.testing.assert_close(found[name], exact[name], rtol=0, atol=1e-12)


@pytest.mark.parametrize("strategy", [DiLoCo(every=4), LocalSGD(4, inner="each")], ids=repr)
def test_apart_it_goes_on_from_a_boundary(strategy: Any, tmp_path: Path) -> None:
    whole = run(2, fitting_strategies.fit, strategy, {"steps": 20})
    options = {"checkpoints": str(tmp_path / "kept"), "checkpoint_every": 4}
    run(2, fitting_strategies.fit, strategy, {"steps": 8, **options})
    rest = run(2, fitting_strategies.fit, strategy, {"steps": 20, **options})
    for (found, _, _), (expected, _, _) in zip(rest, whole, strict=True):
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-12)


def test_apart_losses_are_logged_by_each_and_at_boundaries_by_all() -> None:
    told = run(2, fitting_strategies.logged, LocalSGD(3), {"steps": 7, "log_every": 1})
    assert [[step for step, _ in of] for of in told] == [[1, 2, 3, 4, 5, 6, 7]] * 2
    same_on_both = [step for (step, ours), (_, theirs) in zip(*told, strict=True) if ours == theirs]
    assert same_on_both == [3, 6, 7]


def test_a_schedule_is_that_of_all_workers_whatever_each_has_made() -> None:
    for steps, rates in run(2, fitting_strategies.scheduled, DiLoCo(every=6, balance="speed"), 24):
        assert steps == 24
        assert rates == pytest.approx([0.5 * 0.9**step for step in (6, 12, 18, 24)])


def test_a_worker_without_a_sample_is_refused() -> None:
    with Ranks(3, fitting_strategies.fit, LocalSGD(4), {"global_batch": 2}) as ranks:
        assert all("global_batch=2 leaves some of 3 workers without a sample" in str(end.error) for end in ranks.wait())


@pytest.mark.parametrize("strategy", [*METHODS, DiLoCo(every=2)], ids=repr)
def test_a_checkpoint_of_three_ranks_goes_on_with_two(strategy: Any, tmp_path: Path) -> None:
    options = {"checkpoints": str(tmp_path / "kept"), "steps": 5}
    run(3, fitting_strategies.fit, strategy, options)
    before = run(3, fitting_strategies.state, strategy, options)[0]
    after = run(2, fitting_strategies.state, strategy, options)[0]
    assert before["step"] == after["step"] == 5
    assert before.pop("method") == after.pop("method")
    torch.testing.assert_close(after, before, rtol=1e-12, atol=1e-15)  # the mean over two is that over three


@pytest.mark.parametrize(
    ("first", "then", "message"),
    [
        (PowerSGD(2), Compressed(TopK(0.1)), "was made with the strategy powersgd, and this run has topk"),
        (Compressed(TopK(0.1)), None, "has a 'strategy', which this run has not"),
        (None, Compressed(TopK(0.1)), "has no 'strategy', only 'model', 'optimizer'"),
        (DiLoCo(every=2), None, "has a 'strategy', which this run has not"),
        (None, DiLoCo(every=2), "has no 'strategy', only 'model', 'optimizer'"),
        (LocalSGD(2), DiLoCo(every=2), "was made with the strategy localsgd, and this run has diloco"),
        (DiLoCo(every=2), DGC(), "was made with the strategy diloco, and this run has dgc"),
    ],
)
def test_a_checkpoint_of_another_strategy_is_refused(first: Any, then: Any, message: str, tmp_path: Path) -> None:
    options = {"checkpoints": str(tmp_path / "kept"), "steps": 2}
    run(2, fitting_strategies.fit, first, options)
    with Ranks(2, fitting_strategies.fit, then, options) as ranks:
        for end in ranks.wait():
            assert isinstance(end.error, BadInput) and message in end.error.message and end.error.hint


@pytest.mark.parametrize(
    ("world", "strategy"), [(2, None), (2, Compressed(TopK(0.1))), (1, Compressed(TopK(0.1)))], ids=repr
)
def test_a_parameter_that_gets_no_gradient_is_named(world: int, strategy: Any) -> None:
    with Ranks(world, fitting_strategies.with_an_unused_parameter, strategy) as ranks:
        for end in ranks.wait():
            assert isinstance(end.error, BadInput), end.said
            assert end.error.message == "parameter '1.weight' gets no gradient from the loss"


def test_a_model_without_parameters_is_refused() -> None:
    with Ranks(2, fitting_strategies.without_parameters) as ranks:
        assert all("Tanh has no parameters that require a gradient" in str(end.error) for end in ranks.wait())


def test_an_optimizer_may_be_a_function_and_a_scheduler_of_that() -> None:
    model = fitting.network()
    made = Trainer(
        model,
        nn.functional.cross_entropy,
        lambda parameters: SGD(parameters, 0.5),
        fitting.samples(),
        global_batch=7,
        steps=3,
        seed=5,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
    )
    made.fit()
    (expected,) = run(1, fitting_strategies.by_hand)
    assert same(_weights(model), expected)


def test_the_strategy_of_the_command_line_reaches_the_trainer() -> None:
    env = {"GPUCTL_STRATEGY": "powersgd:rank=2"}
    named = run(2, fitting_strategies.fit, None, {"steps": 4}, env=env)[0][0]
    assert same(named, run(2, fitting_strategies.fit, PowerSGD(2), {"steps": 4})[0][0])
    with Ranks(2, fitting_strategies.fit, DGC(), {}, env=env) as ranks:
        assert all("the strategy is named twice" in str(end.error) for end in ranks.wait())


def _weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}
