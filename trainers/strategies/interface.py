"""What a method is to ``Trainer`` and to a loop of one's own."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, Self, runtime_checkable

from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer


@runtime_checkable
class GradientExchange(Protocol):
    """Makes each rank's gradients, in ``backward`` and while it goes on, those that all ranks step with."""

    bucket_mb: float
    """How many MiB of gradients travel together: smaller ones leave earlier, larger ones cost less each."""

    keeps_gradients: bool
    """Whether part of a gradient is sent in a later step. Then gradients must not be scaled by a factor that changes,
    nor be left out after they were exchanged."""

    def attach(self, model: DistributedDataParallel, optimizer: Optimizer | None = None) -> Self:
        """Take over the exchange of ``model``'s gradients; once, on every rank. ``optimizer`` is what steps with them,
        for a method that has to know.

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

    def state_dict(self) -> dict[str, Any]:
        """The same on all ranks, all of which make the call."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ``BadInput`` for the state of another method."""
        ...


Strategy = GradientExchange | Sequence[GradientExchange]
"""What ``Trainer(strategy=…)`` takes."""
