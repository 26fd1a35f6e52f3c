"""``DGC``: Deep Gradient Compression (Lin et al. 2018, arXiv:1712.01887), algorithm 4; the names are the paper's."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from gpuctl.cluster.errors import BadInput
from gpuctl.cluster.jobs.strategy import bucket_size, fraction, positive_or_none, whole
from gpuctl.cluster.jobs.strategy import ratio as checked_ratio
from gpuctl.trainers.compression.reducers import exact_mean, gathered_mean
from gpuctl.trainers.compression.topk import TopK
from gpuctl.trainers.strategies.gradient.bucket_hook import Bucket, BucketHook, Gradient, are_finite, flat, write
from gpuctl.trainers.strategies.gradient.method_state import attached, check_free, loaded, mean_over_ranks
from gpuctl.trainers.strategies.gradient.sparsity import ratio_at
from gpuctl.trainers.strategies.gradient.synchronous import BUCKET_MB
from gpuctl.trainers.strategies.other_method import check_method


class DGC:
    """Each rank keeps its own momentum u and what it has not sent yet, v, and sends the largest values of v::

        u ← m·u + g           momentum correction: velocities wait, not gradients
        v ← v + u
        send v where it is largest (mask); v ← v ⊙ ¬mask; u ← u ⊙ ¬mask      momentum factor masking

    The momentum is this method's, so the optimizer is ``SGD`` without any. ``clip`` bounds the norm of each gradient
    before it is added, as clipping by ``clip`` would on one rank: by ``clip``/√N. ``warmup_steps`` are those in which
    the ratio comes down from a quarter. What is sent whole (biases, norms, and matrices at ratio 1) has plain momentum,
    since nothing of it waits. A step has one backward pass that is exchanged, as with micro-batches in ``no_sync``.

    Raises ``BadInput`` for a number that is out of its bounds, and ``attach`` for an optimizer with a momentum.
    """

    keeps_gradients = True
    is_strategy: Literal[True] = True

    def __init__(
        self,
        ratio: float = 0.001,
        *,
        momentum: float = 0.9,
        clip: float | None = None,
        warmup_steps: int = 0,
        bucket_mb: float = BUCKET_MB,
    ) -> None:
        self.ratio = checked_ratio(ratio)
        self.momentum = fraction(momentum, "momentum")
        self.clip = positive_or_none(clip, "clip")
        self.warmup_steps = whole(warmup_steps, "warmup_steps", least=0)
        self.bucket_mb = bucket_size(bucket_mb)
        self._u: dict[str, Tensor] = {}
        self._v: dict[str, Tensor] = {}
        self._hook: BucketHook | None = None

    def __repr__(self) -> str:
        return f"DGC({self.ratio:g})"

    @property
    def residual(self) -> dict[str, Tensor]:
        """v on this rank, by the names of parameters: vectors in row-major order."""
        return self._v

    def attach(self, model: nn.Module, optimizer: Optimizer | None = None) -> Self:
        """See ``GradientExchange``."""
        check_free(self._hook)
        if optimizer is not None and not (
            isinstance(optimizer, SGD) and all(group["momentum"] == 0 for group in optimizer.param_groups)
        ):
            raise BadInput(
                f"DGC has the momentum itself, and {type(optimizer).__name__} would add another one",
                "use torch.optim.SGD with momentum=0, and DGC(momentum=…)",
            )
        self._hook = BucketHook(model, self._exchange, keeps=True)
        return self

    def rehearsing(self) -> AbstractContextManager[None]:
        """See ``GradientExchange``."""
        return attached(self._hook).rehearsing()

    def state_dict(self) -> dict[str, Any]:
        """See ``Stateful``: the means of u and v, and the step."""
        hook = attached(self._hook)
        means = {"u": mean_over_ranks(self._u, hook.group), "v": mean_over_ranks(self._v, hook.group)}
        return {"method": "dgc", "step": hook.steps, **means}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See ``Stateful``. Another ratio or momentum is welcome."""
        hook = attached(self._hook)
        check_method(state, "dgc")
        hook.steps = state["step"]
        self._u, self._v = loaded(state["u"], hook), loaded(state["v"], hook)

    def _exchange(self, bucket: Bucket) -> None:
        ratio = ratio_at(bucket.step, self.ratio, self.warmup_steps)
        sparse, whole_ones = bucket.split() if ratio < 1 else ([], bucket.gradients)
        self._exchange_whole(whole_ones, bucket)
        self._exchange_largest(sparse, TopK(ratio), bucket)

    def _exchange_largest(self, gradients: list[Gradient], top: TopK, bucket: Bucket) -> None:
        us = [
            self._moved(one.name, self._clipped(g, bucket)) for one, g in zip(gradients, flat(gradients), strict=True)
        ]
        vs = [u + self._v[one.name] if one.name in self._v else u.clone() for one, u in zip(gradients, us, strict=True)]
        gathered = gathered_mean(vs, top, bucket.seed, bucket.group)
        write(gradients, gathered.means)
        if not gathered.is_finite:
            return
        for gradient, u, v, wire in zip(gradients, us, vs, gathered.sent, strict=True):
            _, mask = top.decode_sparse(wire, v.numel(), v.dtype)
            v[mask] = 0
            u[mask] = 0
            self._u[gradient.name], self._v[gradient.name] = u, v

    def _exchange_whole(self, gradients: list[Gradient], bucket: Bucket) -> None:
        """Momentum SGD: u ← m·u + mean of g. What waited of a matrix, from before, goes with it."""
        us = [
            self._moved(one.name, self._clipped(g, bucket)) for one, g in zip(gradients, flat(gradients), strict=True)
        ]
        vs = [u + self._v[one.name] if one.name in self._v else u for one, u in zip(gradients, us, strict=True)]
        means = exact_mean(vs, bucket.group)
        write(gradients, means)
        if are_finite(means):
            for gradient, u in zip(gradients, us, strict=True):
                self._u[gradient.name] = u
                self._v.pop(gradient.name, None)

    def _velocities(self, gradients: list[Gradient], bucket: Bucket) -> list[Tensor]:
        own = [self._clipped(g, bucket) for g in flat(gradients)]
        return [self._moved(gradient.name, g) for gradient, g in zip(gradients, own, strict=True)]

    def _moved(self, name: str, g: Tensor) -> Tensor:
        """u ← m·u + g, in 32 bits at least."""
        g = g.to(torch.promote_types(g.dtype, torch.float32))
        u = self._u.get(name)
        return g.clone() if u is None else g.add(u, alpha=self.momentum)

    def _clipped(self, g: Tensor, bucket: Bucket) -> Tensor:
        """``g``, no longer than ``clip``/√N: the norm of the sum of N independent ones is √N times that of one."""
        if self.clip is None:
            return g
        most = self.clip / math.sqrt(bucket.group.size())
        clipped: Tensor = g * (most / g.norm().clamp(min=most))
        return clipped
