from __future__ import annotations

from typing import Any

import pytest

from gpuctl import DGC, Compressed, DiLoCo, LocalSGD, PowerSGD, Synchronous, TopK
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


def test_an_outer_loop_takes_the_place_of_an_exchange_in_each_step() -> None:
    diloco = DiLoCo()
    plan, plain = Plan.of(diloco, None), Plan.of(None, None)
    assert plan.is_exact and (plan.outer.lock_step, plain.outer.lock_step) == (False, True)
    assert plan.outer is diloco and plan.stateful is diloco and plain.stateful is None
    top_k = Compressed(TopK(0.1))
    assert Plan.of(top_k, None).stateful is top_k
    assert repr(Plan.of(None, parse("diloco:every=50")).outer) == "DiLoCo(every=50)"


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
        ((DiLoCo(), LocalSGD(4)), None, "DiLoCo(every=500) and LocalSGD(every=4) both average weights"),
        (
            (PowerSGD(4), DiLoCo()),
            None,
            "DiLoCo(every=500) exchanges weights now and then, and PowerSGD(4) gradients in each step",
        ),
        (DiLoCo(), "diloco:every=50", "named twice: --strategy diloco:every=50, and DiLoCo(every=500) in the script"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_built(strategy: Any, chosen: str | None, message: str) -> None:
    with pytest.raises(BadInput) as refused:
        Plan.of(strategy, None if chosen is None else parse(chosen))
    assert message in refused.value.message and refused.value.hint
