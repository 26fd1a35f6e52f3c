"""What a worker knows of ``--strategy``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gpuctl.cluster.errors import BadInput
from gpuctl.cluster.jobs.strategy import StrategyChoice
from gpuctl.cluster.worker_context import STRATEGY_READ
from gpuctl.trainers.strategies.chosen import chosen


def test_the_choice_is_that_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen({"GPUCTL_STRATEGY": "topk:ratio=0.01"}) == StrategyChoice("topk", {"ratio": 0.01})
    assert chosen({"GPUCTL_STRATEGY": ""}) is None
    assert chosen({}) is None
    monkeypatch.setenv("GPUCTL_STRATEGY", "int8")
    assert chosen() == StrategyChoice("int8")


def test_a_wrong_one_is_refused_with_the_name_of_the_variable(tmp_path: Path) -> None:
    said = "^GPUCTL_STRATEGY=topk is invalid: topk needs a ratio; for example, --strategy topk:ratio=0.01$"
    with pytest.raises(BadInput, match=said):
        chosen({"GPUCTL_STRATEGY": "topk", "GPUCTL_ROUND_DIR": str(tmp_path)})


def test_the_agent_is_told_that_it_was_read(tmp_path: Path) -> None:
    chosen({"GPUCTL_ROUND_DIR": str(tmp_path)})
    assert not (tmp_path / STRATEGY_READ).exists()
    chosen({"GPUCTL_STRATEGY": "exact", "GPUCTL_ROUND_DIR": str(tmp_path)})
    assert (tmp_path / STRATEGY_READ).exists()
    assert chosen({"GPUCTL_STRATEGY": "exact", "GPUCTL_ROUND_DIR": str(tmp_path / "gone")}) == StrategyChoice("exact")


def test_it_imports_no_torch() -> None:
    code = "import sys, gpuctl.trainers.strategies.chosen; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
