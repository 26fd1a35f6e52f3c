"""``DiLoCo`` (Douillard et al. 2023, arXiv:2311.08105), algorithm 1; the names are the paper's."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gpuctl.cluster.jobs.strategy import fraction, positive
from gpuctl.trainers.compression.cast import Cast
from gpuctl.trainers.compression.int8 import Int8
from gpuctl.trainers.exchange.interface import Exchange
from gpuctl.trainers.strategies.outer.local_steps import Balance, Inner, LocalSteps


class DiLoCo(LocalSteps):
    """Each worker makes ``every`` steps by itself; what it has learned by then is a gradient to an outer optimizer::

        θᵢ ← InnerOpt(θᵢ, gᵢ)            H times
        Δᵢ = θ⁽ᵗ⁻¹⁾ − θᵢ                 the pseudo-gradient of worker i
        Δ = Σ wᵢ Δᵢ / Σ wᵢ               the only thing that travels
        θ⁽ᵗ⁾ = OuterOpt(θ⁽ᵗ⁻¹⁾, Δ)        SGD with Nesterov momentum
        θᵢ ← θ⁽ᵗ⁾

    The inner optimizer is the loop's own, AdamW in the paper. ``rate`` and ``momentum`` are the outer optimizer's. The
    other options are as in ``LocalSGD``; the outer optimizer does nothing in ``warmup_steps``.

    Raises ``BadInput`` for a number that is out of its bounds.
    """

    method = "diloco"

    def __init__(
        self,
        every: int = 500,
        *,
        rate: float = 0.7,
        momentum: float = 0.9,
        warmup_steps: int = 0,
        codec: Int8 | Cast | None = None,
        balance: Balance = "equal",
        inner: Inner = "first",
    ) -> None:
        super().__init__(every, warmup_steps, codec, balance, inner)
        self.rate = positive(rate, "rate")
        self.momentum = fraction(momentum, "momentum")
        self._b: dict[str, Tensor] = {}
        """The outer momentum, by parameter."""

    def attach(self, model: nn.Module, optimizer: Optimizer | None = None, exchange: Exchange | None = None) -> Self:
        """See ``LocalSteps``."""
        super().attach(model, optimizer, exchange)
        _, local = self._attached()
        self._b = {name: torch.zeros_like(theta) for name, theta in zip(local.names, local.theta, strict=True)}
        return self

    def _outer_step(self, theta: list[Tensor], deltas: list[Tensor]) -> None:
        """As ``torch.optim.SGD(nesterov=True)``: b ← μ·b + Δ; θ ← θ − rate·(Δ + μ·b)."""
        for one, b, delta in zip(theta, self._b.values(), deltas, strict=True):
            b.mul_(self.momentum).add_(delta)
            one.sub_(delta.add(b, alpha=self.momentum), alpha=self.rate)

    def state_dict(self) -> dict[str, Any]:
        """See ``LocalSteps``; with the outer momentum."""
        return {**super().state_dict(), "momentum": dict(self._b)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See ``LocalSteps``. Another rate or momentum is welcome."""
        _, local = self._attached()
        local.check_names(state.get("momentum", {}))
        super().load_state_dict(state)
        for name, b in state["momentum"].items():
            self._b[name].copy_(b)
