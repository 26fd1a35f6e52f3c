"""``Trainer``: a training loop that survives the loss of machines, read from top to bottom.

The global batch and the order of samples depend on (seed, step) only, never on the world (see ``sampling``), and each
gradient is the mean over the global batch however it is divided. So a run that lost nodes follows the loss curve of one
that did not; with as many nodes as before, on CPU, its weights are the same to the last bit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from gpuctl.cluster.checkpoints.retention import Retention
from gpuctl.cluster.errors import BadInput
from gpuctl.trainers.checkpoint.checkpointer import Checkpointer
from gpuctl.trainers.data.batches import Batches, MicroBatch, length_of
from gpuctl.trainers.data.sampling import Place, Sampling, mixed, slice_of
from gpuctl.trainers.metrics.stream import log_metrics, metrics
from gpuctl.trainers.strategies.chosen import chosen
from gpuctl.trainers.strategies.gradient.synchronous import ddp
from gpuctl.trainers.strategies.gradients import Gradients, Parts, normalized, summed
from gpuctl.trainers.strategies.interface import Strategy
from gpuctl.trainers.strategies.plan import Plan
from gpuctl.trainers.world import World, join_process_group

Precision = Literal["fp32", "bf16", "fp16"]
_BF16 = "use precision='bf16', or no strategy"
_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class Fitted:
    """The result of ``fit``."""

    steps: int
    """Optimizer steps done, those of earlier rounds included."""
    loss: float
    """Mean over the global batch of the last step that was logged; NaN if this process made none."""


class Trainer:
    """Trains ``model`` for ``steps`` optimizer steps on a map-style ``dataset`` of (input, target) pairs.

    ``loss(output, target)`` is the mean over the samples it is given. ``global_batch`` counts the samples of one step
    over all ranks; a rank whose share is larger than ``micro_batch`` goes through it in parts and adds up the
    gradients. The device is this rank's GPU if there is one. Seed before you build the model: a run that is lost before
    its first checkpoint begins anew.

    Layers that mix the samples of one rank (BatchNorm) see other groups when the world changes; nothing here hides it.

    Raises ``BadInput`` for a batch that does not fit the data set, a data set without a length, or an option that is
    none.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Tensor, Tensor], Tensor],
        optimizer: Optimizer | Callable[[Iterable[nn.Parameter]], Optimizer],
        dataset: Dataset[Any],
        *,
        global_batch: int,
        steps: int,
        seed: int = 0,
        scheduler: LRScheduler | Callable[[Optimizer], LRScheduler] | None = None,
        strategy: Strategy | None = None,
        precision: Precision = "fp32",
        micro_batch: int | None = None,
        checkpoint_every: int | Literal["auto"] | None = None,
        checkpoint_keep: int | Retention | None = 3,
        checkpoints: str | None = None,
        log_every: int = 10,
        workers: int = 0,
    ) -> None:
        """``checkpoints`` is where they go outside of a gpuctl job (see ``Checkpointer``); each has the ``loss`` that
        was logged last, for ``Retention.best``. ``workers``, as in ``DataLoader``, load what is not a
        ``TensorDataset``. ``strategy`` says what ranks exchange, if ``--strategy`` does not; the exact mean of their
        gradients, if neither does. ``optimizer`` may be a function that makes one for the model's parameters, and
        ``scheduler`` one that makes one for that."""
        if precision not in _DTYPES:
            raise BadInput(f"unknown precision {precision!r}", f"use one of {', '.join(_DTYPES)}")
        for name, number in (("micro_batch", micro_batch), ("log_every", log_every)):
            if number is not None and number < 1:
                raise BadInput(f"{name}={number} is not a number of samples or steps", "use 1 or more")
        plan = Plan.of(strategy, chosen())
        if not any(p.requires_grad for p in model.parameters()):
            raise BadInput(
                f"{type(model).__name__} has no parameters that require a gradient", "there is nothing to train in it"
            )
        if precision == "fp16" and torch.cuda.is_available() and plan.exchange.keeps_gradients:
            raise BadInput(f"fp16 scales gradients by a factor that changes, and {plan.exchange} keeps some", _BF16)
        self.device = join_process_group(alone=not plan.is_exact)
        self.model = model.to(self.device)
        self.checkpointer = Checkpointer(checkpoints, every=checkpoint_every, keep=checkpoint_keep)
        self._optimizer = optimizer if isinstance(optimizer, Optimizer) else optimizer(self.model.parameters())
        self._scheduler = scheduler(self._optimizer) if callable(scheduler) else scheduler
        self._steps = steps
        self._seed = seed
        self._log_every = log_every
        self._world = World.now()
        self._sampling = Sampling(length_of(dataset), global_batch, seed)
        self._batches = Batches(dataset, self._sampling, self._world, micro_batch, workers)
        self._scaler = torch.GradScaler(self.device.type, enabled=precision == "fp16" and self.device.type == "cuda")
        self._scales = self._scaler.is_enabled()
        self._plan = plan
        model, ranks = self.model, 1
        if plan.outer.lock_step and (self._world.size > 1 or not plan.is_exact):
            model, ranks = ddp(model, self.device, plan.exchange.bucket_mb), self._world.size
            plan.exchange.attach(model, self._optimizer)
        elif not plan.outer.lock_step and global_batch < self._world.size:
            raise BadInput(
                f"global_batch={global_batch} leaves some of {self._world.size} workers without a sample",
                f"{plan.outer} needs one for each",
            )
        scaler = self._scaler if self._scales else None
        self._gradients = Gradients(model, loss, self.device, ranks, _DTYPES[precision], scaler)

    def fit(self) -> Fitted:
        """Go on from the newest checkpoint to the last step.

        Does not return if this machine is to be taken: after a last checkpoint the process ends with code 0.
        """
        self._rehearse()
        outer = self._plan.outer.attach(self.model, self._optimizer)
        state = self._state()
        start = self.checkpointer.restore(state) or 0
        if start > self._steps:
            # Of a longer run: to save here would put its weights under another step.
            return Fitted(start, math.nan)
        said = _Said(start, time.perf_counter())
        metrics().steps = self._steps
        self.model.train()
        outer.begin(start)
        while outer.step < self._steps:
            for place, micro_batches in self._batches.of(outer.places(self._steps)):
                before = outer.step
                loss = self._step(place, micro_batches)
                samples = sum(weight for _, _, weight in micro_batches)
                at_boundary = outer.after_step(samples)
                done = outer.step
                self._advance(done - before)
                # At a boundary all ranks log, or none: from the one before on they have counted alike.
                if self._is_logged(start, outer.since if at_boundary else before, done):
                    said = self._log(done, summed(loss), samples, said, at_boundary)
                metrics().progress(done)
                if at_boundary:
                    self.checkpointer.step(done, state, {"loss": said.loss})
                    if not outer.lock_step:
                        break  # what comes next depends on what all have done
        self.checkpointer.save(self._steps, state, {"loss": said.loss})
        self.checkpointer.wait()
        return Fitted(self._steps, said.loss)

    def evaluate(self, dataset: Dataset[Any], metric: Callable[[Tensor, Tensor], Tensor], batch: int = 1024) -> float:
        """Mean of ``metric(output, target)``, a tensor with a value for each sample, over ``dataset``.

        All ranks take part, each with its share, and all get the answer: that of the model as rank 0 has it, which is
        the one that checkpoints hold (BatchNorm's averages differ from rank to rank).
        """
        if self._world.size > 1:
            for buffer in self.model.buffers():
                dist.broadcast(buffer, src=0)
        count = length_of(dataset)
        if count == 0:
            raise BadInput("the data set is empty", "evaluate on one with samples")
        begin, end = slice_of(count, self._world.rank, self._world.size)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        self.model.eval()
        with torch.no_grad():
            for first in range(begin, end, batch):
                inputs, targets = self._batches.fetch(dataset, torch.arange(first, min(first + batch, end)))
                values = metric(self.model(inputs.to(self.device)), targets.to(self.device))
                if values.numel() != len(inputs):
                    raise BadInput(
                        f"the metric has {values.numel()} values for {len(inputs)} samples",
                        "return one for each (a loss of torch does with reduction='none')",
                    )
                total += values.double().sum()
        if self._world.size > 1:
            dist.all_reduce(total)
        return float(total) / count

    # -- one step -----------------------------------------------------------------------------------------------------

    def _step(self, place: Place, micro_batches: list[MicroBatch]) -> Parts:
        """One optimizer step; returns this rank's parts of the loss."""
        self._seed_step(place)
        self._optimizer.zero_grad()
        if not self._plan.outer.lock_step:
            micro_batches = normalized(micro_batches)
        loss = self._gradients.accumulate(micro_batches)
        if self._scales:
            self._scaler.step(self._optimizer)
            self._scaler.update()
        else:
            self._optimizer.step()
        return loss

    def _advance(self, steps: int) -> None:
        """Have the scheduler make ``steps`` steps: as many as the schedule of all ranks has."""
        if self._scheduler is not None:
            for _ in range(steps):
                self._scheduler.step()

    def _seed_step(self, place: Place) -> None:
        """Dropout and the like depend on (seed, step, rank), not on what was drawn before."""
        seed = mixed(self._seed, *place)
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def _is_logged(self, start: int, before: int, done: int) -> bool:
        """Whether one of the steps after ``before`` up to ``done`` is to be logged."""
        is_due = done // self._log_every > before // self._log_every
        return done > before and (is_due or before == start or done == self._steps)

    def _log(self, done: int, loss: Tensor, samples: float, said: _Said, at_boundary: bool) -> _Said:
        """``loss`` is this rank's part of the mean; its own over ``samples``, if it trains alone."""
        if self._world.size > 1 and self._plan.outer.lock_step:
            dist.all_reduce(loss)
        elif self._world.size > 1 and at_boundary:
            sums = torch.stack([loss * samples, torch.full_like(loss, samples)])
            dist.all_reduce(sums)
            loss = sums[0] / sums[1]
        now = time.perf_counter()
        mean = float(loss)
        rate = (done - said.step) / (now - said.at)
        log_metrics(done, loss=mean, steps_per_s=round(rate, 3), lr=self._optimizer.param_groups[0]["lr"])
        return _Said(done, now, mean)

    # -- before the first ---------------------------------------------------------------------------------------------

    def _rehearse(self) -> None:
        """One backward pass whose gradients are thrown away.

        DDP lays out its buckets anew after the first one, in the order in which gradients came. Another layout adds up
        in another order, so without this the first step of each process would differ in the last bits from the same
        step of an undisturbed run.
        """
        if self._gradients.model is self.model or self._steps == 0:
            return  # nothing is exchanged
        kept = [buffer.clone() for buffer in self.model.buffers()]
        self.model.train()
        with self._plan.exchange.rehearsing():
            self._gradients.accumulate(self._batches.at((0, self._world.rank)))
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad and parameter.grad is None:
                raise BadInput(f"parameter {name!r} gets no gradient from the loss", "freeze it: requires_grad_(False)")
        self._optimizer.zero_grad()
        with torch.no_grad():
            for buffer, value in zip(self.model.buffers(), kept, strict=True):
                buffer.copy_(value)

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = {"model": self.model, "optimizer": self._plan.outer.kept(self._optimizer)}
        if self._scheduler is not None:
            state["scheduler"] = self._scheduler
        if self._scales:
            state["scaler"] = self._scaler
        if (strategy := self._plan.stateful) is not None:
            state["strategy"] = strategy
        return state


@dataclass(frozen=True, slots=True)
class _Said:
    """The last record of the metrics."""

    step: int
    at: float
    loss: float = math.nan
