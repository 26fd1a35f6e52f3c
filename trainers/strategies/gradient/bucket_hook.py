"""``BucketHook``: a method's exchange in the place of DDP's all-reduce, while the backward pass goes on.

DDP calls its communication hook with a bucket of gradients as soon as all of them are there, and takes a future. What
is to be done with the bucket is done one after the other, in the order of the buckets, which is the same on all ranks:
on CPU by a thread of its own with a process group of its own, on a GPU in a stream of its own. So a method may make any
number of collectives for a bucket, and is written as if it were alone.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from gpuctl.cluster.errors import BadInput
from gpuctl.trainers.compression.reducers import exact_mean


@dataclass(frozen=True, slots=True)
class Gradient:
    """One parameter's gradient in a bucket; what is written into it is what ranks step with."""

    name: str
    """Of the parameter, in the model without DDP."""
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
        return ((self.step << 16 | self.index) << 16) | self.group.rank()

    def split(self) -> tuple[list[Gradient], list[Gradient]]:
        """The matrices, and the rest: biases and norms are a thousandth of a model, and what is cut there is missed."""
        matrices = [g for g in self.gradients if is_matrix(g.value)]
        return matrices, [g for g in self.gradients if not is_matrix(g.value)]


def is_matrix(tensor: Tensor) -> bool:
    """Whether it has rows and columns, and anything in them."""
    return tensor.dim() >= 2 and tensor.numel() > 0


Exchange = Callable[[Bucket], None]
"""Makes the gradients of one bucket, in place, those that all ranks step with."""


class BucketHook:
    """Calls ``exchange`` for each bucket of ``model``'s gradients. A model takes one such hook, for ever.

    Raises ``BadInput`` if it has one, is not in DDP, or has gradients that are no dense tensors.
    """

    def __init__(self, model: DistributedDataParallel, exchange: Exchange) -> None:
        _check(model)
        self.parameters = dict(model.module.named_parameters())
        self.device = model.device
        self.group, self._run = _lane(model)
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
            Gradient(self._names[id(parameter)], gradient)
            for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True)
        ]
        one = Bucket(self.steps, bucket.index(), gradients, self.group)
        if self._rehearses:
            return self._run(lambda: exact(gradients, self.group), bucket.buffer())
        if bucket.is_last():
            self.steps += 1
        return self._run(lambda: self._exchange(one), bucket.buffer())


def exact(gradients: list[Gradient], group: dist.ProcessGroup) -> None:
    """Make each the exact mean."""
    write(gradients, exact_mean(flat(gradients), group))


def flat(gradients: list[Gradient]) -> list[Tensor]:
    """Each gradient as a vector, in row-major order."""
    return [g.value.reshape(-1) for g in gradients]


def write(gradients: list[Gradient], means: list[Tensor]) -> None:
    """Have ranks step with ``means``, which are vectors in row-major order."""
    for gradient, mean in zip(gradients, means, strict=True):
        gradient.value.copy_(mean.view(gradient.value.shape))


_ONE = "attach one method, once, and register no hook besides"

_Run = Callable[[Callable[[], None], Tensor], Future[Tensor]]
"""Has a function called after those before, and fulfils a future with the tensor."""


def _lane(model: DistributedDataParallel) -> tuple[dist.ProcessGroup, _Run]:
    """Where buckets are worked on, with a group for it."""
    of_ddp = model.process_group
    if model.device.type == "cuda":
        # NCCL's order is that of the calls, and here they are made by the same thread.
        stream = torch.cuda.Stream(model.device)
        return of_ddp, lambda work, buffer: _in_stream(stream, work, buffer)
    # In a thread, two collectives of one group could meet another rank's in the other order (a broadcast of buffers).
    group = dist.new_group(
        dist.get_process_group_ranks(of_ddp),
        timeout=of_ddp._get_backend(model.device).options._timeout,  # else torch's default, which is half an hour
        backend="gloo",
        use_local_synchronization=True,
    )
    waiting: queue.SimpleQueue[tuple[Callable[[], None], Tensor, Future[Tensor]]] = queue.SimpleQueue()
    threads = torch.get_num_threads()

    def work_off() -> None:
        torch.set_num_threads(threads)  # else as many as there are cores, in this thread
        while True:
            _one(*waiting.get())

    threading.Thread(target=work_off, name="gradient exchange", daemon=True).start()

    def run(work: Callable[[], None], buffer: Tensor) -> Future[Tensor]:
        future: Future[Tensor] = Future()
        waiting.put((work, buffer, future))
        return future

    return group, run


def _one(work: Callable[[], None], buffer: Tensor, future: Future[Tensor]) -> None:
    """Called for each bucket, so that nothing of it is held until the next one comes."""
    try:
        with torch.no_grad():
            work()
    except Exception as error:  # noqa: BLE001 - raised by backward, in the script
        future.set_exception(error)  # type: ignore[arg-type]  # as torch has it in its stubs
    else:
        future.set_result(buffer)


def _in_stream(stream: torch.cuda.Stream, work: Callable[[], None], buffer: Tensor) -> Future[Tensor]:
    future: Future[Tensor] = Future(devices=[buffer.device])
    stream.wait_stream(torch.cuda.current_stream(buffer.device))
    buffer.record_stream(stream)
    with torch.cuda.stream(stream):
        _one(work, buffer, future)
    return future


def _check(model: nn.Module) -> None:
    if not isinstance(model, DistributedDataParallel):
        if any("FSDP" in kind.__name__ for kind in type(model).__mro__):
            raise BadInput("FSDP leaves one copy of each gradient, so there is nothing to compress", "use DDP")
        raise BadInput(
            f"gradients of a {type(model).__name__} are not exchanged", "attach to DistributedDataParallel(model)"
        )
    for name, module in model.module.named_modules():
        if getattr(module, "sparse", False) is True:
            raise BadInput(f"{name!r} makes sparse gradients, which no method here takes", "use sparse=False")
