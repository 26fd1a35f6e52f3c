"""``Compressed``: each gradient through a codec; with error feedback where the codec leaves something out."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Literal, Self

from torch import nn
from torch.optim import Optimizer

from gpuctl.cluster.errors import BadInput
from gpuctl.cluster.jobs.strategy import bucket_size, whole
from gpuctl.trainers.compression.cast import Cast
from gpuctl.trainers.compression.error_feedback import ErrorFeedback
from gpuctl.trainers.compression.int8 import Int8
from gpuctl.trainers.compression.reducers import cast_mean, gathered_mean, two_hop_mean
from gpuctl.trainers.compression.topk import TopK
from gpuctl.trainers.strategies.gradient.bucket_hook import Bucket, BucketHook, Gradient, exact, flat, write
from gpuctl.trainers.strategies.gradient.method_state import attached, check_free, loaded, mean_over_ranks
from gpuctl.trainers.strategies.gradient.sparsity import ratio_at
from gpuctl.trainers.strategies.gradient.synchronous import BUCKET_MB
from gpuctl.trainers.strategies.other_method import check_method


class Compressed:
    """Exchanges gradients as ``codec`` makes them: ``TopK``, ``Int8`` or ``Cast``.

    ``TopK`` sends a part of each matrix, and keeps the rest for later (see ``ErrorFeedback``); biases, norms and all
    else with fewer than two dimensions are exact. ``warmup_steps`` are those in which its ratio comes down from a
    quarter.

    Raises ``BadInput`` for what is no codec, or a number that is out of its bounds.
    """

    is_strategy: Literal[True] = True

    def __init__(self, codec: TopK | Int8 | Cast, *, warmup_steps: int = 0, bucket_mb: float = BUCKET_MB) -> None:
        if not isinstance(codec, TopK | Int8 | Cast):
            raise BadInput(
                f"{codec!r} is not a codec", "use Compressed(TopK(0.01)), Compressed(Int8()) or Cast('bf16')"
            )
        if warmup_steps and not isinstance(codec, TopK):
            raise BadInput(f"{codec!r} has no ratio that could come down in warmup_steps", "leave out warmup_steps")
        self.codec = codec
        self.keeps_gradients = isinstance(codec, TopK)
        self.warmup_steps = whole(warmup_steps, "warmup_steps", least=0)
        self.bucket_mb = bucket_size(bucket_mb)
        self._feedback = ErrorFeedback()
        self._hook: BucketHook | None = None

    def __repr__(self) -> str:
        return f"Compressed({self.codec!r})"

    @property
    def method(self) -> str:
        """As ``--strategy`` names it."""
        return self.codec.name

    @property
    def residual(self) -> dict[str, Any]:
        """What this rank has not sent yet, by the names of parameters: vectors in row-major order."""
        return self._feedback.residual

    def attach(self, model: nn.Module, optimizer: Optimizer | None = None) -> Self:  # noqa: ARG002
        """See ``GradientExchange``."""
        check_free(self._hook)
        self._hook = BucketHook(model, self._exchange, keeps=self.keeps_gradients)
        return self

    def rehearsing(self) -> AbstractContextManager[None]:
        """See ``GradientExchange``."""
        return attached(self._hook).rehearsing()

    def state_dict(self) -> dict[str, Any]:
        """See ``Stateful``: the mean residual, which each rank of any number goes on from, and the step."""
        hook = attached(self._hook)
        return {
            "method": self.method,
            "step": hook.steps,
            "residual": mean_over_ranks(self._feedback.residual, hook.group),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See ``Stateful``. Another ratio or chunk is welcome."""
        hook = attached(self._hook)
        check_method(state, self.method)
        hook.steps = state["step"]
        self._feedback.residual = loaded(state["residual"], hook)

    def _exchange(self, bucket: Bucket) -> None:
        match self.codec:
            case TopK():
                matrices, others = bucket.split()
                exact(others, bucket.group)
                self._exchange_largest(matrices, self.codec, bucket)
            case Int8():
                write(bucket.gradients, two_hop_mean(flat(bucket.gradients), self.codec, bucket.seed, bucket.group))
            case Cast():
                write(bucket.gradients, cast_mean(flat(bucket.gradients), self.codec, bucket.group))

    def _exchange_largest(self, gradients: list[Gradient], codec: TopK, bucket: Bucket) -> None:
        """What all ranks step with is the mean of what each has sent of xᵢ."""
        codec = TopK(ratio_at(bucket.step, codec.ratio, self.warmup_steps), codec.chunk)
        xs = [self._feedback.with_residual(g.name, g.value) for g in gradients]  # xᵢ = gᵢ + eᵢ
        gathered = gathered_mean(xs, codec, bucket.seed, bucket.group)
        write(gradients, gathered.means)
        if gathered.is_finite:
            for gradient, x, wire in zip(gradients, xs, gathered.sent, strict=True):
                self._feedback.keep(gradient.name, x, codec, wire)  # eᵢ ← xᵢ − sent(xᵢ)
