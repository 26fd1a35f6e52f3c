"""The strategy of a run: from the script, from ``--strategy``, or none; and what is refused."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gpuctl.cluster.errors import BadInput
from gpuctl.cluster.jobs.strategy import StrategyChoice
from gpuctl.trainers.strategies.gradient.synchronous import Synchronous
from gpuctl.trainers.strategies.interface import GradientExchange, OuterLoop, Stateful, Strategy
from gpuctl.trainers.strategies.named import named
from gpuctl.trainers.strategies.outer.every_step import EveryStep

_HINT = "give DiLoCo(every=500), Compressed(TopK(0.01)) or PowerSGD(4), say, or none for the exact mean"


@dataclass(frozen=True, slots=True)
class Plan:
    """What ``Trainer`` knows of its strategy."""

    exchange: GradientExchange = field(default_factory=Synchronous)
    outer: OuterLoop = field(default_factory=EveryStep)

    @property
    def is_exact(self) -> bool:
        """Whether DDP does all that is exchanged in a step, so that a world of one needs none."""
        return isinstance(self.exchange, Synchronous)

    @property
    def stateful(self) -> Stateful | None:
        """The one of the two that remembers something."""
        found = [one for one in (self.exchange, self.outer) if isinstance(one, Stateful)]
        return found[0] if found else None

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
            strategy = named(chosen)
        if strategy is None:
            return cls()
        several: tuple[Any, ...] = tuple(strategy) if isinstance(strategy, tuple | list) else (strategy,)
        for one in several:
            if isinstance(one, type) or not isinstance(one, GradientExchange | OuterLoop):
                raise BadInput(f"{one!r} is not a strategy", _HINT)
        exchanges = [one for one in several if isinstance(one, GradientExchange)]
        outer = [one for one in several if isinstance(one, OuterLoop)]
        for same, what in ((exchanges, "exchange gradients"), (outer, "average weights")):
            if len(same) > 1:
                raise BadInput(f"{same[0]!r} and {same[1]!r} both {what}", "use one of them")
        if exchanges and outer:
            raise BadInput(
                f"{outer[0]!r} exchanges weights now and then, and {exchanges[0]!r} gradients in each step",
                "use one of them; DiLoCo and LocalSGD take a codec= of their own",
            )
        return cls(exchange=exchanges[0]) if exchanges else cls(outer=outer[0]) if outer else cls()
