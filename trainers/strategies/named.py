"""The strategy that ``--strategy`` names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from gpuctl.cluster.errors import BadInput
from gpuctl.cluster.jobs.strategy import StrategyChoice, parse
from gpuctl.trainers.compression.cast import Cast
from gpuctl.trainers.compression.int8 import Int8
from gpuctl.trainers.compression.topk import TopK
from gpuctl.trainers.strategies.chosen import chosen
from gpuctl.trainers.strategies.gradient.compressed import Compressed
from gpuctl.trainers.strategies.gradient.dgc import DGC
from gpuctl.trainers.strategies.gradient.powersgd import PowerSGD
from gpuctl.trainers.strategies.gradient.synchronous import Synchronous
from gpuctl.trainers.strategies.interface import GradientExchange, OuterLoop
from gpuctl.trainers.strategies.outer.diloco import DiLoCo
from gpuctl.trainers.strategies.outer.local_sgd import LocalSGD

_ONCE = "leave one of them out"


def named(choice: StrategyChoice) -> GradientExchange | OuterLoop:
    """The strategy of that name and with those options. Raises ``BadInput`` for an option out of its bounds."""
    return _STRATEGIES[choice.name](**choice.options)


def strategy(text: str | None = None) -> GradientExchange | OuterLoop | None:
    """The strategy that ``text`` names, such as ``"diloco:every=50"``, for a loop of one's own; without it the one that
    ``gpuctl train --strategy`` names, or ``GPUCTL_STRATEGY``. ``None`` where neither does.

    Raises ``BadInput`` for a text that names none, or where both do.
    """
    choice = chosen()
    if text is None:
        return None if choice is None else named(choice)
    if choice is not None:
        raise BadInput(f"the strategy is named twice: --strategy {choice}, and {text!r} in the script", _ONCE)
    return named(parse(text))


def _top_k(ratio: float, chunk: int = 4096, **others: Any) -> Compressed:
    return Compressed(TopK(ratio, chunk), **others)


def _int8(chunk: int = 256, **others: Any) -> Compressed:
    return Compressed(Int8(chunk), **others)


def _local_steps(made: Callable[..., OuterLoop], codec: str = "fp32", **others: Any) -> OuterLoop:
    return made(codec=_CODECS[codec](), **others)


_CODECS: dict[str, Callable[[], Int8 | Cast | None]] = {
    "fp32": lambda: None,
    "bf16": lambda: Cast("bf16"),
    "fp16": lambda: Cast("fp16"),
    "int8": Int8,
}

_STRATEGIES: dict[str, Callable[..., GradientExchange | OuterLoop]] = {
    "exact": Synchronous,
    "bf16": lambda **others: Compressed(Cast("bf16"), **others),
    "fp16": lambda **others: Compressed(Cast("fp16"), **others),
    "int8": _int8,
    "topk": _top_k,
    "dgc": DGC,
    "powersgd": PowerSGD,
    "localsgd": partial(_local_steps, LocalSGD),
    "diloco": partial(_local_steps, DiLoCo),
}
