"""``EveryStep``: gradients are exchanged in each step, so that each one is a boundary."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self

from torch import nn
from torch.optim import Optimizer

from gpuctl.trainers.data.sampling import Place
from gpuctl.trainers.world import World


class EveryStep:
    """The ``OuterLoop`` of a run that has none."""

    lock_step = True

    def __init__(self) -> None:
        self.step = 0
        """See ``OuterLoop``."""

    @property
    def since(self) -> int:
        """See ``OuterLoop``."""
        return self.step - 1

    def attach(self, model: nn.Module, optimizer: Optimizer | None = None) -> Self:  # noqa: ARG002
        """See ``OuterLoop``: there is nothing to do between steps."""
        return self

    def begin(self, step: int) -> Self:
        """See ``OuterLoop``."""
        self.step = step
        return self

    def places(self, stop: int) -> Iterable[Place]:
        """See ``OuterLoop``: all that are left, since nothing changes them."""
        rank = World.now().rank
        return ((step, rank) for step in range(self.step, stop))

    def after_step(self, samples: float = 1.0) -> bool:  # noqa: ARG002
        """See ``OuterLoop``."""
        self.step += 1
        return True

    def kept(self, optimizer: Optimizer) -> Any:
        """See ``OuterLoop``: the same on all ranks."""
        return optimizer
