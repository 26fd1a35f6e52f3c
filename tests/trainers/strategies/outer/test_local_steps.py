"""What methods share that train apart: speeds, stops, checkpoints, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gpuctl import Cast, DiLoCo, First, LocalSGD, Private, TopK
from gpuctl.cluster.errors import BadInput
from tests.trainers.rank_scripts import training_apart
from tests.trainers.rank_scripts.training_apart import KEEPERS
from tests.trainers.ranks import Ranks, run
from tests.trainers.strategies.outer.test_diloco import close


def test_workers_make_as_many_steps_as_they_can_in_the_same_time() -> None:
    """Of three, one is three times as fast as the others: it takes three fifths."""
    told = run(3, training_apart.by_speed, LocalSGD(10, balance="speed"), [0.3, 0.1, 0.3], 40)
    assert [[step for step, _ in of] for of in told] == [[10, 20, 30, 40]] * 3
    assert [len(taken) for _, taken in told[1]] == [10, 18, 18, 18]
    assert [len(taken) for _, taken in told[0]] == [10, 6, 6, 6]
    every_place = sorted(place for of in told for _, taken in of for place in taken)
    assert every_place == [(step, worker) for step in range(40) for worker in range(3)]  # each batch once


def test_unlike_numbers_of_steps_weigh_as_much_as_their_samples() -> None:
    for tensors, told in run(3, training_apart.unlike_weights, [1.0, 2.0, 5.0]):
        mean = (0 * 1 + 1 * 2 + 2 * 5) / 8
        assert np.allclose(tensors[0], mean) and np.allclose(tensors[1], mean) and np.allclose(tensors[2], mean)
        assert told == [[0.0, 0.5], [1.0, 0.5], [2.0, 0.5]]


def test_asked_to_stop_all_end_the_outer_step_at_once_save_and_leave(tmp_path: Path) -> None:
    with Ranks(2, training_apart.a_stop, DiLoCo(every=50), str(tmp_path), [0, 1], 1000) as ranks:
        assert [end.code for end in ranks.wait()] == [0, 0]
    # The third step after the boundary of step 50.
    (last,) = {int((tmp_path / f"last.{rank}").read_text()) for rank in range(2)}
    assert last == 53
    told = run(2, training_apart.a_stop, DiLoCo(every=50), str(tmp_path), [], 103)
    assert [lengths for lengths, _ in told] == [[50], [50]]  # from step 53 on


def test_if_only_one_is_asked_to_stop_training_goes_on(tmp_path: Path) -> None:
    told = run(2, training_apart.a_stop, LocalSGD(5), str(tmp_path), [1], 60)
    assert told[0][0][:2] == [5, 5]
    assert told[1][0][:2] == [5, 3]
    assert close(told[0][1], told[1][1], 0)


@pytest.mark.parametrize("method", [LocalSGD(4), DiLoCo(every=4)], ids=repr)
@pytest.mark.parametrize("inner", ["first", "each"])
def test_a_run_goes_on_from_its_boundary_as_if_nothing_had_been(method: Any, inner: str, tmp_path: Path) -> None:
    folder = str(tmp_path)
    run(2, training_apart.saved_at, method, folder, 8, 8, KEEPERS[inner])
    told = run(2, training_apart.resumed, method, folder, KEEPERS[inner], 20)
    expected = run(2, training_apart.through, method, 20)
    for worker, (step, at, _, after) in enumerate(told):
        assert step == 8
        assert close(at, told[0][1], 0)
        if inner == "each":
            assert close(after, expected[worker])  # to the last digits, since each goes on with its own moments
        else:
            assert not close(after, expected[worker], 1e-9)
    is_one = all((told[0][2][i] == told[1][2][i]).all() for i in told[0][2])
    assert is_one == (inner == "first")


def test_the_first_workers_optimizer_is_kept_whole(tmp_path: Path) -> None:
    """Parameters that are the same on all workers are written in parts by all of them."""
    run(3, training_apart.saved_at, LocalSGD(4), str(tmp_path), 4, 4, First)
    ours = run(3, training_apart.moments, 4)
    for step, _, moments, _ in run(2, training_apart.resumed, LocalSGD(4), str(tmp_path), First, 4):
        assert step == 4
        for index, moment in moments.items():
            assert (moment == ours[0][index]).all()
            assert not (moment == ours[1][index]).any()


@pytest.mark.parametrize("inner", ["first", "each"])
@pytest.mark.parametrize("worlds", [(3, 2), (2, 3)])
def test_a_checkpoint_is_for_any_number_of_workers(inner: str, worlds: tuple[int, int], tmp_path: Path) -> None:
    before, after = worlds
    run(before, training_apart.saved_at, DiLoCo(every=4), str(tmp_path), 4, 4, KEEPERS[inner])
    told = run(after, training_apart.resumed, DiLoCo(every=6), str(tmp_path), KEEPERS[inner], 10)
    for worker, (step, at, moments, end) in enumerate(told):
        assert step == 4 and close(at, told[0][1], 0) and close(end, told[0][3], 0)
        # A worker that was not there goes on with the first one's optimizer.
        of_first = all((moments[index] == told[0][2][index]).all() for index in moments)
        assert of_first == (inner == "first" or worker in (0, before))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("a part", "'part' of the state is trained by LocalSGD(every=4), which the state lacks"),
        ("no method", "'model' of the state is trained by LocalSGD(every=4), which the state lacks"),
        (
            "bare optimizer",
            "'optimizer' of the state may be another one on each worker, since LocalSGD(every=4) trains them apart",
        ),
        (
            "bare average",
            "'average' of the state may be another one on each worker, since LocalSGD(every=4) trains them apart",
        ),
    ],
)
def test_no_checkpoint_can_mix_the_workers(what: str, message: str, tmp_path: Path) -> None:
    with Ranks(2, training_apart.incomplete, what, str(tmp_path)) as ranks:
        for end in ranks.wait():
            assert isinstance(end.error, BadInput) and message in end.error.message, end.said


def test_between_boundaries_nothing_is_saved(tmp_path: Path) -> None:
    with Ranks(2, training_apart.saved_at, DiLoCo(every=4), str(tmp_path), 8, 6, First) as ranks:
        for end in ranks.wait():
            assert isinstance(end.error, BadInput), end.said
            assert end.error.message == (
                "a checkpoint 2 steps after a boundary of DiLoCo(every=4) would mix the workers' weights"
            )


def test_neither_goes_on_from_the_others_checkpoint(tmp_path: Path) -> None:
    apart, plain = str(tmp_path / "apart"), str(tmp_path / "plain")
    run(2, training_apart.saved_at, DiLoCo(every=4), apart, 4, 4, First)
    run(1, training_apart.plain_checkpoint, plain)
    refused: list[tuple[str, Any]] = [
        ("has a 'method', which this run has not", (training_apart.plainly, apart, True)),
        ("has no 'method', only 'model', 'optimizer'", (training_apart.resumed, DiLoCo(every=4), plain, First, 8)),
        (
            "was made with the strategy diloco, and this run has localsgd",
            (training_apart.resumed, LocalSGD(4), apart, First, 8),
        ),
        ("has no Private 'optimizer', only 'model'", (training_apart.resumed, DiLoCo(every=4), apart, Private, 8)),
    ]
    for message, (body, *arguments) in refused:
        with Ranks(2, body, *arguments) as ranks:
            for end in ranks.wait():
                assert isinstance(end.error, BadInput) and message in end.error.message, end.said
    assert run(1, training_apart.plainly, apart, False) == [4]  # to use the model needs no strategy


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("values", "parameter '1.weight' is not the same on workers 0 and 1 at the start"),
        ("names", "worker 1 has no parameter '1.weight'"),
    ],
)
def test_workers_that_begin_apart_are_told(how: str, message: str) -> None:
    with Ranks(2, training_apart.unlike_models, how) as ranks:
        for end in ranks.wait():
            assert isinstance(end.error, BadInput) and end.error.message == message, end.said


def test_only_what_training_changes_is_averaged_of_the_buffers() -> None:
    for before, after in run(2, training_apart.with_other_buffers):
        assert after == [before[0], before[1], [0.5, 0.5]]


def test_complex_weights_are_averaged_whole() -> None:
    assert run(2, training_apart.complex_mean) == [[1 + 1j, 1 + 1j]] * 2


def test_parameters_must_be_those_that_were_attached() -> None:
    with Ranks(1, training_apart.replaced) as ranks:
        (end,) = ranks.wait()
    assert "parameter 'weight' is not the one that LocalSGD(every=1) was attached to" in str(end.error)


def test_a_notice_cuts_neither_of_two_methods(tmp_path: Path) -> None:
    told = run(2, training_apart.two_methods, 10, env={"TEST_FOLDER": str(tmp_path)})
    assert told == [(10, 10)] * 2


def test_a_worker_that_has_not_joined_the_others_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(BadInput, match="it has no process group yet"):
        LocalSGD(4).attach(nn.Linear(2, 2))


def test_what_is_trained_stays_the_same() -> None:
    with Ranks(1, training_apart.frozen_later) as ranks:
        (end,) = ranks.wait()
    assert "parameter '0.weight' is trained, which it was not when LocalSGD(every=1) was attached" in str(end.error)


def test_a_model_in_ddp_is_refused() -> None:
    with Ranks(2, training_apart.both, LocalSGD(4)) as ranks:
        for end in ranks.wait():
            assert isinstance(end.error, BadInput) and "averages weights now and then, and DDP" in end.error.message


def test_what_cannot_be_is_refused() -> None:
    refusals: list[tuple[Callable[[], object], str]] = [
        (lambda: DiLoCo(every=0), "every must be a whole number of at least 1, not 0"),
        (lambda: DiLoCo(rate=float("nan")), "rate must be a number above 0, not nan"),
        (lambda: DiLoCo(rate="fast"), "rate must be a number above 0, not 'fast'"),  # type: ignore[arg-type]
        (lambda: DiLoCo(momentum=1.0), "momentum must be a number of at least 0 and below 1, not 1.0"),
        (lambda: LocalSGD(4, balance="fair"), "balance must be equal or speed, not 'fair'"),  # type: ignore[arg-type]
        (lambda: LocalSGD(4, inner="all"), "inner must be first or each, not 'all'"),  # type: ignore[arg-type]
        (lambda: LocalSGD(4, codec=TopK(0.1)), "TopK(0.1) leaves out what an outer step never gets back"),  # type: ignore[arg-type]
        (lambda: LocalSGD(4, codec="bf16"), "'bf16' is not a codec"),  # type: ignore[arg-type]
        (lambda: First(3), "First(3) has no state to keep"),
        (lambda: LocalSGD(4).after_step(), "LocalSGD(every=4) has no model yet"),
        (lambda: LocalSGD(4).attach(nn.Linear(2, 2)).after_step(0), "samples=0 is not what a step is made of"),
        (lambda: Private(LocalSGD(4)), "LocalSGD(every=4) is the same on all workers"),
        (lambda: LocalSGD(4).attach(nn.Tanh()), "Tanh has no parameters that require a gradient"),
    ]
    for made, message in refusals:
        with pytest.raises(BadInput) as refused:
            made()
        assert refused.value.message == message


def test_one_model_has_one_method_and_a_method_one_model() -> None:
    model = nn.Linear(2, 2)
    method = DiLoCo(every=4, codec=Cast("bf16")).attach(model)
    with pytest.raises(BadInput, match="both average the weights of one model"):
        LocalSGD(4).attach(model)
    with pytest.raises(BadInput, match="trains another model already"):
        method.attach(nn.Linear(2, 2))


def test_attached_again_it_takes_the_weights_that_are_there() -> None:
    model = nn.Linear(2, 2)
    method = DiLoCo(every=1, rate=1.0, momentum=0.0).attach(model)
    with torch.no_grad():
        model.weight.fill_(3.0)
    method.attach(model)
    method.after_step()
    assert (model.weight == 3.0).all()
