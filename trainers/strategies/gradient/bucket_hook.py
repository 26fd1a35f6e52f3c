"""``BucketHook``: a method's exchange in the place of DDP's all-reduce, while the backward pass goes on.

DDP calls its communication hook with a bucket of gradients as soon as all of them are there, and takes a future.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from gpuctl.cluster.errors import BadInput
from gpuctl.trainers.checkpoint.state.state_tensors import WRAPPERS
from gpuctl.trainers.compression.reducers import exact_mean
from gpuctl.trainers.data.sampling import mixed
from gpuctl.trainers.strategies.gradient.lane import lane_of


@dataclass(frozen=True, slots=True)
class Gradient:
    """One parameter's gradient in a bucket; what is written into it is what ranks step with."""

    name: str
    """Of the parameter, in the model without DDP and other wrappers."""
    value: Tensor
    """Of the parameter's shape."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that are there at the same moment."""

    step: int
    """How many backward passes came before."""
    index: int
    """In the order in which all ranks exchange the buckets of a step."""
    gradients: list[Gradient]
    group: dist.ProcessGroup

    @property
    def seed(self) -> int:
        """Of what is drawn for this bucket: another one in each step, and on each rank."""
        return mixed(self.step, self.index, self.group.rank())

    def split(self) -> tuple[list[Gradient], list[Gradient]]:
        """The matrices, and the rest: biases and norms are a thousandth of a model, and what is cut there is missed."""
        matrices = [g for g in self.gradients if is_matrix(g.value)]
        return matrices, [g for g in self.gradients if not is_matrix(g.value)]


Exchange = Callable[[Bucket], None]
"""Makes the gradients of one bucket, in place, those that all ranks step with."""


class BucketHook:
    """Calls ``exchange`` for each bucket of ``model``'s gradients. A model takes one such hook, for ever.

    ``keeps``: whether the method sends part of a gradient in a later step. Raises ``BadInput`` for a model that has a
    hook, is not in DDP, has gradients that are no dense tensors, or, where ``keeps``, may leave out what was exchanged.
    """

    def __init__(self, model: nn.Module, exchange: Exchange, *, keeps: bool) -> None:
        self.parameters = parameters_of(model, keeps=keeps)
        assert isinstance(model, DistributedDataParallel)
        self.device = model.device
        self.group, self._run = lane_of(model)
        self.steps = 0
        """Backward passes that were exchanged."""
        self._names = {id(parameter): name for name, parameter in self.parameters.items()}
        self._exchange = exchange
        self._rehearses = False
        try:
            # Without annotations, which torch would have as types, and these are texts.
            model.register_comm_hook(None, lambda _, bucket: self._on_bucket(bucket))
        except RuntimeError as error:
            raise BadInput(f"this model's gradients are exchanged by another hook already: {error}", _ONE) from error

    @contextlib.contextmanager
    def rehearsing(self) -> Iterator[None]:
        """See ``GradientExchange``."""
        self._rehearses = True
        try:
            yield
        finally:
            self._rehearses = False

    def _on_bucket(self, bucket: dist.GradBucket) -> Future[Tensor]:
        gradients = [
            Gradient(self._names[id(parameter)], _laid_out_as(parameter, gradient))
            for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True)
        ]
        one = Bucket(self.steps, bucket.index(), gradients, self.group)
        if self._rehearses:
            return self._run(lambda: exact(gradients, self.group), bucket.buffer())
        if bucket.is_last():
            self.steps += 1
        return self._run(lambda: self._exchange(one), bucket.buffer())


def parameters_of(model: nn.Module, *, keeps: bool) -> dict[str, nn.Parameter]:
    """By the names that a checkpoint has them under. Raises what ``BucketHook`` does."""
    if not isinstance(model, DistributedDataParallel):
        if any("FSDP" in kind.__name__ for kind in type(model).__mro__):
            raise BadInput("FSDP leaves one copy of each gradient, so there is nothing to compress", "use DDP")
        raise BadInput(
            f"gradients of a {type(model).__name__} are not exchanged", "attach to DistributedDataParallel(model)"
        )
    if keeps and model.find_unused_parameters:
        raise BadInput(
            "with find_unused_parameters, DDP leaves out gradients whose kept parts were sent already",
            "use Int8(), Cast('bf16') or the exact mean, or a model whose parameters are all used",
        )
    for name, module in model.module.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise BadInput(f"{name!r} makes sparse gradients, which no method here takes", "use sparse=False")
    return {
        ".".join(part for part in name.split(".") if part not in WRAPPERS): parameter
        for name, parameter in model.module.named_parameters()
    }


def is_matrix(tensor: Tensor) -> bool:
    """Whether it has rows and columns, and anything in them."""
    return tensor.dim() >= 2 and tensor.numel() > 0


def exact(gradients: Sequence[Gradient], group: dist.ProcessGroup) -> None:
    """Make each the exact mean."""
    write(gradients, exact_mean(flat(gradients), group))


def flat(gradients: Sequence[Gradient]) -> list[Tensor]:
    """Each gradient as a vector, in row-major order."""
    return [g.value.reshape(-1) for g in gradients]


def write(gradients: Sequence[Gradient], means: Sequence[Tensor]) -> None:
    """Have ranks step with ``means``, which are vectors in row-major order."""
    for gradient, mean in zip(gradients, means, strict=True):
        gradient.value.copy_(mean.view(gradient.value.shape))


def are_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether a method may keep something of a step: ``tensors`` are what all ranks have alike of it.

    If not, a loop skips this step, on all ranks; what a method keeps must stay as it was, or the inf of one bad batch
    would be in it for ever.
    """
    return all(bool(tensor.sum().isfinite()) for tensor in tensors)


_ONE = "attach one method, once, and register no hook besides"


def _laid_out_as(parameter: Tensor, gradient: Tensor) -> Tensor:
    """``gradient`` as it lies in a bucket of DDP's, with the strides of its parameter: DDP copies the memory of one
    that is dense as it is, and the bucket's views have the shape only."""
    if parameter.is_contiguous() or not _is_dense(parameter):
        return gradient
    return gradient.as_strided(parameter.shape, parameter.stride(), gradient.storage_offset())


def _is_dense(tensor: Tensor) -> bool:
    """Whether its values fill their memory, each once, in whatever order."""
    expected = 1
    for stride, size in sorted((t, s) for s, t in zip(tensor.shape, tensor.stride(), strict=True) if s != 1):
        if stride != expected:
            return False
        expected *= size
    return True
