"""What a method is to ``Trainer`` and to a loop of one's own.

``GradientExchange`` acts in each step, ``OuterLoop`` between steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol, Self, runtime_checkable

from torch import nn
from torch.optim import Optimizer

from gpuctl.trainers.data.sampling import Place


@runtime_checkable
class GradientExchange(Protocol):
    """Makes each rank's gradients, in ``backward`` and while it goes on, those that all ranks step with."""

    bucket_mb: float
    """How many MiB of gradients travel together: smaller ones leave earlier, larger ones cost less each."""

    keeps_gradients: bool
    """Whether part of a gradient is sent in a later step. Then gradients must not be scaled by a factor that changes,
    nor be left out after they were exchanged."""

    def attach(self, model: nn.Module, optimizer: Optimizer | None = None) -> Self:
        """Take over the exchange of gradients of ``model``, which is in DDP; once, on every rank. ``optimizer`` is what
        steps with them, for a method that has to know.

        Raises ``BadInput`` for a model or an optimizer that the method cannot work with.
        """
        ...

    def rehearsing(self) -> AbstractContextManager[None]:
        """Within it gradients are exchanged as they are, and the method's state stays as it is."""
        ...


@runtime_checkable
class Stateful(Protocol):
    """A method that remembers something from step to step: it goes into the state that a ``Checkpointer`` keeps.

    What it remembers is the same for every world: a checkpoint of four ranks is loaded by three, or by one.
    """

    is_strategy: Literal[True]
    """A checkpoint that has it is not trained on without it (see ``checkpoint.state.private``)."""

    def state_dict(self) -> dict[str, Any]:
        """The same on all ranks, all of which make the call."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ``BadInput`` for the state of another method."""
        ...


@runtime_checkable
class OuterLoop(Protocol):
    """Workers that train apart, each on its part of the data, and now and then make one of what they have learned.

    A *step* is one of the schedule, in which all workers together take one global batch. At a *boundary* all of them
    hold the same weights, so that a checkpoint can be taken: there, and nowhere else.
    """

    lock_step: bool
    """Whether every step is a boundary, since gradients are exchanged in each."""

    def attach(self, model: nn.Module, optimizer: Optimizer | None = None) -> Self:
        """Take ``model`` as all workers have it now; once, on every worker.

        Raises ``BadInput`` for a model that the method cannot work with, or that is not the same on all workers.
        """
        ...

    def begin(self, step: int) -> Self:
        """``step`` steps are done."""
        ...

    @property
    def step(self) -> int:
        """Steps that are done; at a boundary the same on all workers."""
        ...

    @property
    def since(self) -> int:
        """Steps that were done at the boundary before this moment."""
        ...

    def places(self, stop: int) -> Iterable[Place]:
        """Where in the data this worker's next steps are, up to the next boundary and no further than step ``stop``."""
        ...

    def after_step(self, samples: float = 1.0) -> bool:
        """Call it after each step of the optimizer, which was on ``samples`` samples, in any unit. ``True`` at a
        boundary, which all workers come to; until then it does not wait for anybody."""
        ...

    def kept(self, optimizer: Optimizer) -> Any:
        """``optimizer``, as the state of a checkpoint has it."""
        ...


Strategy = GradientExchange | OuterLoop | Sequence[GradientExchange | OuterLoop]
"""What ``Trainer(strategy=…)`` takes."""
