"""Deep Gradient Compression over four real ranks, beside the paper's lines written out."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, AdamW

from gpuctl import DGC
from gpuctl.cluster.errors import BadInput
from tests.trainers import ranks
from tests.trainers.rank_scripts import exchanging

SGD_ALONE = functools.partial(SGD, lr=0.05)


def test_ratio_one_is_momentum_sgd() -> None:
    dgc = ranks.run(4, exchanging.trained, DGC(1.0, momentum=0.9), SGD_ALONE, 5)[0]
    exact = ranks.run(4, exchanging.trained, None, functools.partial(SGD, lr=0.05, momentum=0.9), 5)[0]
    for name, weights in exact.items():
        assert torch.allclose(dgc[name], weights, rtol=0, atol=1e-13), name


def test_each_step_is_the_papers() -> None:
    """Algorithm 4 by hand, over what each rank's gradients were; and what was sent is 0 in both buffers."""
    ratio, momentum = 0.05, 0.9
    told = ranks.run(4, exchanging.gradients, DGC(ratio, momentum=momentum), 4)
    for name in ("0.weight", "2.weight"):
        n = told[0][0]["own"][name].numel()
        us, vs = ([torch.zeros(n, dtype=torch.float64) for _ in told] for _ in range(2))
        for step in range(4):
            total = torch.zeros(n, dtype=torch.float64)
            for rank, of_rank in enumerate(told):
                us[rank] = momentum * us[rank] + of_rank[step]["own"][name].reshape(-1)
                vs[rank] = vs[rank] + us[rank]
                mask = _largest(vs[rank], ratio)
                total += torch.where(mask, vs[rank], 0)
                us[rank], vs[rank] = torch.where(mask, 0, us[rank]), torch.where(mask, 0, vs[rank])
                assert torch.allclose(of_rank[step]["residual"][name], vs[rank], rtol=0, atol=1e-15)
            assert torch.allclose(told[0][step]["out"][name].reshape(-1), total / 4, rtol=0, atol=1e-15), step


def test_biases_have_plain_momentum() -> None:
    told = ranks.run(2, exchanging.gradients, DGC(0.05, momentum=0.5), 3)
    u: Tensor | float = 0.0
    for step in range(3):
        u = 0.5 * u + torch.stack([of_rank[step]["own"]["0.bias"] for of_rank in told]).mean(0)
        assert torch.allclose(told[0][step]["out"]["0.bias"], u, rtol=0, atol=1e-15)


def test_the_warm_up_sends_a_quarter_first() -> None:
    told = ranks.run(2, exchanging.gradients, DGC(0.01, warmup_steps=2), 3)
    sent = [float((of_step["residual"]["0.weight"] == 0).double().mean()) for of_step in told[0]]
    assert sent == pytest.approx([0.25, 0.05, 0.01], rel=0.05)


def test_a_long_gradient_is_cut_before_it_is_added() -> None:
    told = ranks.run(4, exchanging.gradients, DGC(0.05, clip=0.01), 1)
    for of_rank in told:
        own = of_rank[0]["own"]["0.weight"].reshape(-1)
        most = 0.01 / 4**0.5
        assert own.norm() > most
        clipped = own * (most / own.norm())
        left = torch.where(_largest(clipped, 0.05), 0, clipped)
        assert torch.allclose(of_rank[0]["residual"]["0.weight"], left, rtol=0, atol=1e-16)


def test_the_loss_of_a_rank_keeps_the_means_of_both() -> None:
    left, mean = ranks.run(4, exchanging.saved, DGC(0.05), 3)[1]
    for of_rank in ranks.run(3, exchanging.loaded, DGC(0.05), left):
        for name in mean:
            assert torch.allclose(of_rank["v"][name], mean[name], rtol=0, atol=1e-16)
        for name, u in left["u"].items():
            assert torch.allclose(of_rank["u"][name], u, rtol=0, atol=1e-16)
    assert {"0.bias", "0.weight"} < set(left["u"]) and float(left["u"]["0.weight"].abs().max()) > 0


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (functools.partial(SGD, lr=0.1, momentum=0.9), "SGD would add another one"),
        (functools.partial(AdamW, lr=0.1), "AdamW would add another one"),
    ],
)
def test_an_optimizer_with_a_momentum_is_refused(optimizer: Any, message: str) -> None:
    said = ranks.run(2, exchanging.refused_optimizer, DGC(), optimizer)[0]
    assert message in said


@pytest.mark.parametrize(
    "options", [{"ratio": 0}, {"momentum": 1}, {"clip": -1.0}, {"warmup_steps": -1}, {"bucket_mb": 0}], ids=str
)
def test_a_number_out_of_its_bounds_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match=next(iter(options))):
        DGC(**options)


def _largest(v: Tensor, ratio: float, chunk: int = 4096) -> Tensor:
    """Where the largest of each chunk stand, by sorting."""
    mask = torch.zeros_like(v, dtype=torch.bool)
    for begin in range(0, len(v), chunk):
        part = v[begin : begin + chunk].abs()
        mask[begin + part.argsort(descending=True)[: max(1, round(ratio * len(part)))]] = True
    return mask
