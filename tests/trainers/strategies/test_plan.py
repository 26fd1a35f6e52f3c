from __future__ import annotations

from typing import Any

import pytest

from gpuctl import DGC, Compressed, PowerSGD, Synchronous, TopK
from gpuctl.cluster.errors import BadInput
from gpuctl.cluster.jobs.strategy import parse
from gpuctl.trainers.strategies.plan import Plan


def test_without_any_it_is_the_exact_mean() -> None:
    for plan in (Plan.of(None, None), Plan.of((), None)):
        assert isinstance(plan.exchange, Synchronous) and plan.is_exact


@pytest.mark.parametrize("strategy", [Synchronous(), Compressed(TopK(0.01)), DGC(), PowerSGD()], ids=repr)
def test_the_scripts_own_is_taken(strategy: Any) -> None:
    assert Plan.of(strategy, None).exchange is strategy
    assert Plan.of((strategy,), None).exchange is strategy
    assert Plan.of(strategy, None).is_exact == isinstance(strategy, Synchronous)


def test_the_one_on_the_command_line_is_made() -> None:
    assert repr(Plan.of(None, parse("topk:ratio=0.02")).exchange) == "Compressed(TopK(0.02))"


@pytest.mark.parametrize(
    ("strategy", "chosen", "message"),
    [
        (PowerSGD(4), "topk:ratio=0.01", "named twice: --strategy topk:ratio=0.01, and PowerSGD(4) in the script"),
        ((PowerSGD(4), DGC()), None, "PowerSGD(4) and DGC(0.001) both exchange gradients"),
        ("topk", None, "'topk' is not a strategy"),
        (TopK(0.01), None, "TopK(0.01) is not a strategy"),
        (PowerSGD, None, "is not a strategy"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_built(strategy: Any, chosen: str | None, message: str) -> None:
    with pytest.raises(BadInput) as refused:
        Plan.of(strategy, None if chosen is None else parse(chosen))
    assert message in refused.value.message and refused.value.hint
