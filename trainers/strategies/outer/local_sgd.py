"""``LocalSGD``: the mean of the weights after every H steps (Stich 2018, arXiv:1805.09767)."""

from __future__ import annotations

from torch import Tensor

from gpuctl.trainers.compression.cast import Cast
from gpuctl.trainers.compression.int8 import Int8
from gpuctl.trainers.strategies.outer.local_steps import Balance, Inner, LocalSteps, take_mean


class LocalSGD(LocalSteps):
    """Each worker makes ``every`` steps by itself; then all take the mean of their weights::

        θᵢ ← θᵢ − α gᵢ                   H times
        θᵢ ← Σ wᵢ θᵢ / Σ wᵢ

    ``warmup_steps`` at the beginning are followed by a mean each (post-local SGD, Lin et al. 2018, arXiv:1808.07217).
    ``codec`` is what weights are turned into before they travel: their differences to the last mean, in half the width
    (``Cast("bf16")``) or a quarter (``Int8()``). With ``balance="speed"`` workers make unlike numbers of steps, which
    are ``every`` on the mean, so that all need the same time. Of the optimizers, which differ, checkpoints keep the
    ``inner="first"`` one or ``"each"``.

    Raises ``BadInput`` for a number that is out of its bounds.
    """

    method = "localsgd"

    def __init__(
        self,
        every: int,
        *,
        warmup_steps: int = 0,
        codec: Int8 | Cast | None = None,
        balance: Balance = "equal",
        inner: Inner = "first",
    ) -> None:
        super().__init__(every, warmup_steps, codec, balance, inner)

    def _outer_step(self, theta: list[Tensor], deltas: list[Tensor]) -> None:
        take_mean(theta, deltas)
