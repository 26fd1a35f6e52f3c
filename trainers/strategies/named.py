"""The strategy that ``--strategy`` names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpuctl.cluster.jobs.strategy import StrategyChoice
from gpuctl.trainers.compression.cast import Cast
from gpuctl.trainers.compression.int8 import Int8
from gpuctl.trainers.compression.topk import TopK
from gpuctl.trainers.strategies.gradient.compressed import Compressed
from gpuctl.trainers.strategies.gradient.dgc import DGC
from gpuctl.trainers.strategies.gradient.powersgd import PowerSGD
from gpuctl.trainers.strategies.gradient.synchronous import Synchronous
from gpuctl.trainers.strategies.interface import GradientExchange


def named(choice: StrategyChoice) -> GradientExchange:
    """The strategy of that name and with those options. Raises ``BadInput`` for an option out of its bounds."""
    return _STRATEGIES[choice.name](**choice.options)


def _top_k(ratio: float, chunk: int = 4096, **others: Any) -> Compressed:
    return Compressed(TopK(ratio, chunk), **others)


def _int8(chunk: int = 256, **others: Any) -> Compressed:
    return Compressed(Int8(chunk), **others)


_STRATEGIES: dict[str, Callable[..., GradientExchange]] = {
    "exact": Synchronous,
    "bf16": lambda **others: Compressed(Cast("bf16"), **others),
    "fp16": lambda **others: Compressed(Cast("fp16"), **others),
    "int8": _int8,
    "topk": _top_k,
    "dgc": DGC,
    "powersgd": PowerSGD,
}
