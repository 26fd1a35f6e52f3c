"""How many threads a worker starts."""

from __future__ import annotations

import os

import pytest

from gpuctl.trainers.checkpoint.threads import spare_cores


def test_all_workers_of_a_node_together_have_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = len(os.sched_getaffinity(0))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert spare_cores(1) == cores
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(cores))
    assert spare_cores(1) == 1
    assert spare_cores(cores) == 1, "never none"
