"""The strategy of a run: from the script, from ``--strategy``, or none; and what is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpuctl.cluster.errors import BadInput
from gpuctl.cluster.jobs.strategy import StrategyChoice
from gpuctl.trainers.strategies.gradient.synchronous import Synchronous
from gpuctl.trainers.strategies.interface import GradientExchange, Strategy
from gpuctl.trainers.strategies.named import named

_HINT = "give Compressed(TopK(0.01)), PowerSGD(4) or DGC(0.001), say, or none for the exact mean"


@dataclass(frozen=True, slots=True)
class Plan:
    """What ``Trainer`` knows of its strategy."""

    exchange: GradientExchange

    @property
    def is_exact(self) -> bool:
        """Whether DDP does it all, so that a world of one needs none."""
        return isinstance(self.exchange, Synchronous)

    @classmethod
    def of(cls, strategy: Strategy | None, chosen: StrategyChoice | None) -> Plan:
        """``strategy`` is the script's, ``chosen`` that of ``--strategy``.

        Raises ``BadInput`` where both are given, for what is no strategy, and for two that do the same.
        """
        if strategy is not None and chosen is not None:
            raise BadInput(
                f"the strategy is named twice: --strategy {chosen}, and {strategy!r} in the script",
                "leave one of them out",
            )
        if chosen is not None:
            return cls(named(chosen))
        if strategy is None:
            return cls(Synchronous())
        several: tuple[Any, ...] = tuple(strategy) if isinstance(strategy, tuple | list) else (strategy,)
        for one in several:
            if isinstance(one, type) or not isinstance(one, GradientExchange):
                raise BadInput(f"{one!r} is not a strategy", _HINT)
        if not several:
            return cls(Synchronous())
        if len(several) > 1:
            raise BadInput(f"{several[0]!r} and {several[1]!r} both exchange gradients", "use one of them")
        return cls(several[0])
