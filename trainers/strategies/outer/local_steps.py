"""``LocalSteps``: steps on each worker by itself, and boundaries, where all of them become the same again.

Between two boundaries nothing is exchanged and nobody waits. A worker comes to the next one when it has made its share
of steps, or as soon as it is asked to stop: what it has learned by then counts by the samples that it took.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from math import isfinite
from typing import Any, ClassVar, Literal, Self, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gpuctl.cluster.errors import BadInput
from gpuctl.cluster.jobs.strategy import BALANCES, KEPT, one_of, whole
from gpuctl.trainers import stop_signal
from gpuctl.trainers.checkpoint.state.private import First, Private, is_alone, method_of, trains_apart
from gpuctl.trainers.compression.cast import Cast
from gpuctl.trainers.compression.int8 import Int8
from gpuctl.trainers.compression.topk import TopK
from gpuctl.trainers.console import say
from gpuctl.trainers.data.sampling import Place
from gpuctl.trainers.exchange.group import GroupExchange
from gpuctl.trainers.exchange.interface import Exchange, Mean
from gpuctl.trainers.gpus import gpus_in_use, wait_for
from gpuctl.trainers.strategies import speeds
from gpuctl.trainers.strategies.other_method import check_method
from gpuctl.trainers.strategies.outer.local_model import LocalModel

Balance = Literal["equal", "speed"]
Inner = Literal["first", "each"]
_MOST_CUTS = 3
"""Boundaries that a worker brings forward once it is asked to stop. If the others are not asked by then, they will not
be, and waiting for them would leave it idle."""


class LocalSteps(ABC):
    """What LocalSGD and DiLoCo share; see there for the options.

    At a boundary each worker i has Δᵢ = θ − θᵢ, where θ are the weights of the last boundary, and all get their mean,
    weighted by samples. What they make of it is the subclass's: ``_outer_step``.

    The averages of BatchNorm, and other buffers that are saved, are averaged at boundaries.
    """

    lock_step = False
    is_strategy: Literal[True] = True
    method: ClassVar[str]
    """As ``--strategy`` names it."""

    def __init__(
        self, every: int, warmup_steps: int, codec: Int8 | Cast | None, balance: Balance, inner: Inner
    ) -> None:
        if isinstance(codec, TopK):
            raise BadInput(
                f"{codec!r} leaves out what an outer step never gets back", "use Int8() or Cast('bf16') as the codec"
            )
        if codec is not None and not isinstance(codec, Int8 | Cast):
            raise BadInput(f"{codec!r} is not a codec", "use Int8(), Cast('bf16') or none")
        self.every = whole(every, "every")
        self.warmup_steps = whole(warmup_steps, "warmup_steps", least=0)
        self.codec = codec
        self.balance = one_of(balance, "balance", BALANCES)
        self.inner = one_of(inner, "inner", KEPT)
        self._clock = time.perf_counter
        self._exchange: Exchange | None = None
        self._local: LocalModel | None = None
        self._base = 0
        """Steps that were done at the last boundary."""
        self._boundaries = 0
        self._before = 0
        """As ``_base``, at the boundary before."""
        self._cuts = 0
        self._speeds: list[float] = []
        self._length = self._share = 1
        """Steps to the next boundary, as the schedule counts them and as this worker makes them."""
        self._shares: list[int] = []
        """Those of all workers."""
        self._made, self._samples, self._began = 0, 0.0, 0.0
        """Since the last boundary: steps, samples, and when that was."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(every={self.every})"

    @abstractmethod
    def _outer_step(self, theta: list[Tensor], deltas: list[Tensor]) -> None:
        """Make the new weights of θ and the mean Δ, in place."""

    def attach(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,  # noqa: ARG002 - for methods that have to know
        exchange: Exchange | None = None,
    ) -> Self:
        """See ``OuterLoop``. ``exchange``: between whom; by default all ranks of the job."""
        if self._local is not None and model is not self._local.model:
            raise BadInput(f"{self!r} trains another model already", "make one for each model")
        if (other := method_of(model)) is not None and other is not self:
            raise BadInput(f"{other!r} and {self!r} both average the weights of one model", "use one of them")
        self._local = LocalModel(model, repr(self))
        self._exchange = exchange or GroupExchange(self.codec)
        self._exchange.check_alike(self._local.everything())
        if self._exchange.worker == 0 and self._exchange.workers > 1 and (norm := self._local.batch_norm):
            say(f"{norm} takes averages on each worker by itself; at boundaries of {self!r} they become one")
        trains_apart(model, self)
        return self.begin(0)

    @property
    def step(self) -> int:
        """Steps that are done, as a schedule counts them: with unlike shares, each worker's own part of the way."""
        return self._base + self._made * self._length // self._share

    @property
    def since(self) -> int:
        """See ``OuterLoop``."""
        return self._base if self._made else self._before

    @property
    def place(self) -> Place:
        """Where this worker's next batch is in the one order: a step, and which worker's slice of its global batch."""
        return self._place(self._made)

    def begin(self, step: int) -> Self:
        """See ``OuterLoop``."""
        self._base = self._before = step
        self._plan()
        return self

    def places(self, stop: int) -> Iterable[Place]:
        """See ``OuterLoop``."""
        if not self._made:
            self._plan(stop)
        return [self._place(made) for made in range(self._made, self._share)]

    def steps(self, stop: int) -> Iterator[Place]:
        """For a loop of one's own: the places of this worker's steps until step ``stop`` of the run, where the last
        boundary is::

            for step, worker in diloco.steps(1000):
                ...
                if diloco.after_step():
                    checkpointer.step(diloco.step, state)
        """
        while self.step < stop:
            if not self._made:
                self._plan(stop)
            yield self.place

    def after_step(self, samples: float = 1.0) -> bool:
        """See ``OuterLoop``. Raises ``BadInput`` for a number of samples that is none."""
        exchange, local = self._attached()
        if not (isfinite(samples) and samples > 0):
            raise BadInput(f"samples={samples!r} is not what a step is made of", "use a number above 0")
        self._made += 1
        self._samples += samples
        if self._made < self._share and not self._is_cut():
            return False
        self._cuts += self._made < self._share
        self._meet(exchange, local)
        return True

    def finish(self) -> bool:
        """Make a boundary of this moment, to which all workers have come with as many steps. ``False`` if it is one."""
        exchange, local = self._attached()
        if not self._made:
            return False
        self._meet(exchange, local)
        return True

    def kept(self, optimizer: Optimizer) -> Any:
        """See ``OuterLoop``: it differs from worker to worker."""
        return First(optimizer) if self.inner == "first" else Private(optimizer)

    def state_dict(self) -> dict[str, Any]:
        """See ``Stateful``. The weights are the model's; only of narrow ones it has them in 32 bits. Raises
        ``BadInput`` between boundaries, where each worker has others."""
        _, local = self._attached()
        if self._made:
            raise BadInput(
                f"a checkpoint {self._made} steps after a boundary of {self!r} would mix the workers' weights",
                "save where after_step() has returned True, or after finish()",
            )
        return {
            "method": self.method,
            "step": self._base,
            "boundaries": self._boundaries,
            "weights": local.wider_weights(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See ``Stateful``; the model's own state must be loaded before. Another ``every`` is welcome."""
        exchange, local = self._attached()
        check_method(state, self.method)
        local.take_weights(state["weights"])
        self._boundaries = state["boundaries"]
        self.begin(state["step"])
        if exchange.worker == 0:
            say(f"all workers go on from step {self._base}, the last boundary; steps that any made after it are lost")

    # -- a boundary ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _meet(self, exchange: Exchange, local: LocalModel) -> None:
        """Become the same as all others."""
        local.check_trained()
        if self.balance == "speed":
            wait_for(gpus_in_use())
        seconds = self._clock() - self._began
        mean = exchange.mean(
            local.deltas(),
            local.averages(),
            weight=self._samples,
            told=[self.step - self._base, self._made, seconds, stop_signal.is_asked()],
            seed=self._boundaries,
        )
        if self._base < self.warmup_steps:
            take_mean(local.theta, mean.tensors)
        else:
            self._outer_step(local.theta, mean.tensors)
        local.become_theta(mean.exact)
        self._boundaries += 1
        self._go_on(mean, exchange)

    def _go_on(self, mean: Mean, exchange: Exchange) -> None:
        """From here to the next boundary."""
        done, made, seconds, asked = ([of[i] for of in mean.told] for i in range(4))
        if min(done) < max(done) and exchange.worker == 0:
            counts = ", ".join(f"{count:.0f} of {share}" for count, share in zip(made, self._shares, strict=True))
            why = "asked to stop" if any(asked) else "at the end"
            say(
                f"{why}: workers have made {counts} steps from step {self._base} on; training goes on from step "
                f"{self._base + max(done):.0f} without the rest of their data"
            )
        self._before, self._base = self._base, self._base + int(max(done))
        if all(asked):
            stop_signal.agree()
        self._speeds = speeds.updated(self._speeds, made, seconds)
        self._plan()

    def _plan(self, stop: int | None = None) -> None:
        """What each worker does until the next boundary."""
        exchange, _ = self._attached()
        workers = exchange.workers
        self._length = self.every if self._base >= self.warmup_steps else 1
        if stop is not None:
            self._length = max(1, min(self._length, stop - self._base))
        self._shares = [self._length] * workers
        if self.balance == "speed" and self._speeds:
            self._shares = speeds.shares(self._length * workers, self._speeds)
        self._share = self._shares[exchange.worker]
        self._made, self._samples, self._began = 0, 0.0, self._clock()

    def _is_cut(self) -> bool:
        """Whether to end the outer step now. With two methods in a process, a notice between them would cut one of them
        only."""
        return self._cuts < _MOST_CUTS and stop_signal.is_asked() and is_alone(self)

    def _place(self, made: int) -> Place:
        exchange, _ = self._attached()
        if self.balance == "equal":
            return self._base + made, exchange.worker
        index = sum(self._shares[: exchange.worker]) + made
        return self._base + index // exchange.workers, index % exchange.workers

    def _attached(self) -> tuple[Exchange, LocalModel]:
        if self._exchange is None or self._local is None:
            raise BadInput(f"{self!r} has no model yet", "attach() it before it is saved, restored or used")
        return self._exchange, self._local


def take_mean(theta: list[Tensor], deltas: list[Tensor]) -> None:
    """θ ← θ − Δ: the mean of the weights."""
    for one, delta in zip(theta, deltas, strict=True):
        one.sub_(delta)


assert get_args(Balance) == BALANCES
assert get_args(Inner) == KEPT
