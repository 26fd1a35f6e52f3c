"""Codecs in the place of DDP's all-reduce, over four real ranks: what is conserved, and what is left by a lost one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gpuctl import DGC, Cast, Compressed, Int8, PowerSGD, TopK
from gpuctl.cluster.errors import BadInput
from tests.trainers import ranks
from tests.trainers.rank_scripts import exchanging

MATRICES = ("0.weight", "2.weight")


def _of(told: list[Any], step: int, what: str, name: str) -> Tensor:
    """Of each rank, in rows; zeros where there is none yet."""
    found = [of_rank[step][what].get(name) if step >= 0 else None for of_rank in told]
    size = told[0][0]["own"][name].numel()
    return torch.stack([torch.zeros(size, dtype=torch.float64) if x is None else x.reshape(-1) for x in found])


@pytest.mark.parametrize("bucket_mb", [25.0, 0.01], ids=["one bucket", "several"])
def test_what_was_sent_and_what_was_not_are_the_gradients_and_what_was_left_before(bucket_mb: float) -> None:
    told = ranks.run(4, exchanging.gradients, Compressed(TopK(0.05, chunk=512)), 3, bucket_mb)
    for step in range(3):
        for name in told[0][step]["own"]:
            own, out = _of(told, step, "own", name), _of(told, step, "out", name)
            before, after = _of(told, step - 1, "residual", name), _of(told, step, "residual", name)
            assert all(torch.equal(of_rank, out[0]) for of_rank in out), "ranks hold other bits"
            conserved = own.sum(0) + before.sum(0) - 4 * out[0] - after.sum(0)
            assert conserved.abs().max() < 1e-15, (step, name)
    assert 0 < int((_of(told, 0, "out", "0.weight")[0] != 0).sum()) <= 4 * 0.06 * 64 * 96
    assert set(told[0][0]["residual"]) == set(MATRICES), "biases are exact"


def test_ratio_one_is_exact() -> None:
    told = ranks.run(4, exchanging.gradients, Compressed(TopK(1)), 2)
    for name in told[0][1]["own"]:
        mean = _of(told, 1, "own", name).mean(0)
        assert torch.allclose(_of(told, 1, "out", name)[0], mean, rtol=0, atol=1e-15)


def test_the_buckets_make_no_difference_to_what_is_sent() -> None:
    """Values are chosen in each parameter on its own, and added up in the order of ranks: the first step after a
    restart, whose buckets are others, is the same to the last bit."""
    one, several = (ranks.run(2, exchanging.gradients, Compressed(TopK(0.05)), 2, mb) for mb in (25.0, 0.01))
    for name in MATRICES:
        assert torch.equal(one[0][1]["out"][name], several[0][1]["out"][name])


@pytest.mark.parametrize("codec", [Int8(64), Cast("bf16"), Cast("fp16")], ids=repr)
def test_all_ranks_hold_the_same_bits_near_the_mean(codec: Any) -> None:
    told = ranks.run(4, exchanging.gradients, Compressed(codec), 2, 0.01)
    for name in told[0][1]["own"]:
        out, mean = _of(told, 1, "out", name), _of(told, 1, "own", name).mean(0)
        assert all(torch.equal(of_rank, out[0]) for of_rank in out)
        assert 0 < (out[0] - mean).abs().max() < 0.05 * mean.abs().max()
    assert told[0][1]["residual"] == {}


def test_rounding_draws_anew_in_each_step_and_the_same_in_each_run() -> None:
    one, again = (ranks.run(2, exchanging.same_batch, Compressed(Int8()), 3)[0] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, again, strict=True))
    assert not torch.equal(one[1], one[2]), "the buckets of both are the same"


def test_the_loss_of_a_rank_keeps_the_mean_residual() -> None:
    left, mean = ranks.run(4, exchanging.saved, Compressed(TopK(0.05)), 2)[1]
    assert left["method"] == "topk" and left["step"] == 2
    for name, residual in left["residual"].items():
        assert torch.allclose(residual, mean[name], rtol=0, atol=1e-16)
    for of_rank in ranks.run(3, exchanging.loaded, Compressed(TopK(0.05)), left):
        assert of_rank["step"] == 2
        for name, residual in of_rank["residual"].items():
            assert torch.allclose(residual, mean[name], rtol=0, atol=1e-16), "the mean of three is another one"


def test_a_rehearsal_is_exact_and_leaves_no_trace() -> None:
    out, mean, left = ranks.run(2, exchanging.rehearsed, Compressed(TopK(0.05)))[0]
    assert torch.allclose(out, mean, rtol=0, atol=1e-15)
    assert left == {"method": "topk", "step": 0, "residual": {}}


def test_gradients_of_several_micro_batches_are_sent_once() -> None:
    told = ranks.run(2, exchanging.accumulated, Compressed(TopK(0.05)))
    for name in MATRICES:
        own = torch.stack([of_rank["own"][name].reshape(-1) for of_rank in told])
        left = torch.stack([of_rank["residual"][name] for of_rank in told])
        out = told[0]["out"][name].reshape(-1)
        assert (own.sum(0) - left.sum(0) - 2 * out).abs().max() < 1e-15


def test_an_error_in_the_exchange_is_raised_by_backward() -> None:
    said = ranks.run(1, exchanging.failing)[0]
    assert "MemoryError: no room in the codec" in said and "exchanging.py" in said, "and where it was raised"


def test_a_warm_up_of_what_has_no_ratio_is_refused() -> None:
    with pytest.raises(BadInput, match="has no ratio that could come down"):
        Compressed(Int8(), warmup_steps=7)


@pytest.mark.parametrize("codec", [0.01, "topk", TopK])
def test_what_is_no_codec_is_refused(codec: Any) -> None:
    with pytest.raises(BadInput, match="is not a codec"):
        Compressed(codec)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("bare", "gradients of a Sequential are not exchanged"),
        ("twice", "exchanged by another hook already"),
        ("two models", "exchanges the gradients of another model already"),
        ("sparse", "'0' makes sparse gradients"),
        ("unused", "with find_unused_parameters, DDP leaves out gradients"),
        ("fsdp", "FSDP leaves one copy of each gradient"),
        ("state of another", "was made with the strategy powersgd, and this run has topk"),
        ("state of another model", "remembers 5 values of '0.weight', and the model has 6144 values"),
        ("not attached", "this strategy has no model yet"),
    ],
)
def test_a_model_that_cannot_be_is_refused_in_one_line(case: str, message: str) -> None:
    said = ranks.run(2, exchanging.refused, case)[0]
    assert message in said and "\n" not in said


@pytest.mark.parametrize("exchange", [Compressed(TopK(0.1)), DGC(0.1), PowerSGD(2), Compressed(Int8())])
def test_parameters_without_values_are_exchanged_with_the_rest(exchange: Any) -> None:
    assert ranks.run(2, exchanging.of_nothing, exchange) == [True, True]


def test_an_exchange_waits_as_long_as_the_group_of_its_model() -> None:
    assert ranks.run(2, exchanging.timeout_s, Compressed(TopK(0.1)), 7.0) == [7.0, 7.0]
