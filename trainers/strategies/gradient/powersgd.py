"""``PowerSGD`` (Vogels, Karimireddy, Jaggi 2019, arXiv:1905.13727), algorithms 1 and 2; the names are the paper's."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gpuctl.cluster.errors import BadInput
from gpuctl.cluster.jobs.strategy import bucket_size, whole
from gpuctl.trainers.compression.error_feedback import ErrorFeedback
from gpuctl.trainers.compression.reducers import exact_mean, mean_made
from gpuctl.trainers.data.sampling import mixed
from gpuctl.trainers.strategies.gradient.bucket_hook import (
    Bucket,
    BucketHook,
    Gradient,
    are_finite,
    exact,
    is_matrix,
    parameters_of,
    write,
)
from gpuctl.trainers.strategies.gradient.method_state import attached, check_free, loaded, mean_over_ranks
from gpuctl.trainers.strategies.gradient.synchronous import BUCKET_MB
from gpuctl.trainers.strategies.other_method import check_method


class PowerSGD:
    """The mean of all ranks' matrices, as far as it has the rank r, by one step of a power iteration::

        M = Δ + E             (n, m): the gradient and the residual
        P ← mean(M·Q)         (n, r)
        P̂ ← orthogonalize(P)
        Q ← mean(Mᵀ·P̂)        (m, r): kept, the next step begins with it (warm start)
        E ← M − P̂·Qᵀ          what all ranks step with is P̂·Qᵀ

    Of a parameter of more dimensions the first one makes the rows. Those for which n·m ≤ r·(n + m), so that nothing is
    won, are exact, as are biases and norms.

    The residual is against the mean of all ranks, as in the paper: so what is conserved is its mean.

    Raises ``BadInput`` for a rank that is no whole number from 1 on, and ``attach`` for one that is too large for every
    matrix of the model.
    """

    keeps_gradients = True
    is_strategy: Literal[True] = True

    def __init__(self, rank: int = 4, *, bucket_mb: float = BUCKET_MB) -> None:
        self.rank = whole(rank, "rank", least=1)
        self.bucket_mb = bucket_size(bucket_mb)
        self._feedback = ErrorFeedback()
        self._q: dict[str, Tensor] = {}
        self._hook: BucketHook | None = None

    def __repr__(self) -> str:
        return f"PowerSGD({self.rank})"

    @property
    def residual(self) -> dict[str, Tensor]:
        """E on this rank, by the names of parameters: vectors in row-major order."""
        return self._feedback.residual

    def attach(self, model: nn.Module, optimizer: Optimizer | None = None) -> Self:  # noqa: ARG002
        """See ``GradientExchange``."""
        check_free(self._hook)
        parameters = parameters_of(model, keeps=True).values()
        most = max((most_rank(*matrix_shape(p)) for p in parameters if is_matrix(p) and p.requires_grad), default=0)
        if self.rank > most:
            what = f"use a rank of at most {most}" if most else "use Compressed(Int8()), or no strategy"
            raise BadInput(f"rank {self.rank} is too large for every matrix of the model: nothing would be won", what)
        self._hook = BucketHook(model, self._exchange, keeps=True)
        return self

    def rehearsing(self) -> AbstractContextManager[None]:
        """See ``GradientExchange``."""
        return attached(self._hook).rehearsing()

    def state_dict(self) -> dict[str, Any]:
        """See ``Stateful``: the mean residual, Q, which all ranks have alike, and the step."""
        hook = attached(self._hook)
        means = mean_over_ranks(self._feedback.residual, hook.group)
        return {"method": "powersgd", "step": hook.steps, "residual": means, "q": dict(self._q)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See ``Stateful``. With another rank the power iteration begins anew, and the residuals stay."""
        hook = attached(self._hook)
        check_method(state, "powersgd")
        hook.steps = state["step"]
        self._feedback.residual = loaded(state["residual"], hook)
        kept = {name: q.to(hook.device).clone() for name, q in state["q"].items()}
        self._q = {name: q for name, q in kept.items() if q.shape[1] == self.rank}

    def _exchange(self, bucket: Bucket) -> None:
        matrices, others = bucket.split()
        low = [g for g in matrices if self.rank <= most_rank(*matrix_shape(g.value))]
        exact([*others, *(g for g in matrices if self.rank > most_rank(*matrix_shape(g.value)))], bucket.group)
        self._exchange_low(low, bucket)

    def _exchange_low(self, gradients: list[Gradient], bucket: Bucket) -> None:
        names = [g.name for g in gradients]
        xs = [self._feedback.with_residual(g.name, g.value) for g in gradients]
        ms = [x.view(matrix_shape(g.value)) for x, g in zip(xs, gradients, strict=True)]
        qs = [self._start(name, m, index, bucket) for index, (name, m) in enumerate(zip(names, ms, strict=True))]
        root = bucket.index % bucket.group.size()
        ps = mean_made([m @ q for m, q in zip(ms, qs, strict=True)], orthogonalized, root, bucket.group)
        qs = _mean([m.T @ p for m, p in zip(ms, ps, strict=True)], bucket)
        approximations = [(p @ q.T).view(-1) for p, q in zip(ps, qs, strict=True)]
        write(gradients, approximations)
        if not are_finite([*ps, *qs]):
            return
        for name, x, q, approximation in zip(names, xs, qs, approximations, strict=True):
            self._q[name] = q
            self._feedback.residual[name] = x.sub_(approximation)

    def _start(self, name: str, m: Tensor, index: int, bucket: Bucket) -> Tensor:
        """Q of the step before, or drawn from a normal distribution: the same on all ranks."""
        if (kept := self._q.get(name)) is not None:
            return kept
        generator = torch.Generator().manual_seed(mixed(bucket.step, bucket.index, index))
        return torch.randn(m.shape[1], self.rank, generator=generator, dtype=m.dtype).to(m.device)


def matrix_shape(tensor: Tensor) -> tuple[int, int]:
    """Rows and columns of a parameter of two dimensions or more."""
    return tensor.shape[0], tensor[0].numel()


def most_rank(n: int, m: int) -> int:
    """The largest rank for which P and Q have fewer values than the matrix of shape (n, m)."""
    return (n * m - 1) // (n + m)


def orthogonalized(ps: list[Tensor]) -> list[Tensor]:
    """For each, an orthonormal basis of what its columns span; of shape (n, r), with r ≤ n.

    Made on one rank for all: where the columns depend on each other, the last ones of the basis are rounding errors,
    and those of unlike processors would let the ranks' weights part.
    """
    return [torch.linalg.qr(p).Q for p in ps]


def _mean(matrices: list[Tensor], bucket: Bucket) -> list[Tensor]:
    """Over all ranks, in one all-reduce."""
    means = exact_mean([m.reshape(-1) for m in matrices], bucket.group)
    return [mean.view(m.shape) for mean, m in zip(means, matrices, strict=True)]
