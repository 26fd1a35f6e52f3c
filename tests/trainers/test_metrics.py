"""What ``log_metrics`` writes, and what it does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from gpuctl.cluster.worker import METRICS, PROGRESS, WorkerContext
from gpuctl.trainers.metrics import Metrics


@pytest.fixture
def context(tmp_path: Path) -> WorkerContext:
    folders = [tmp_path / name for name in ("round", "checkpoints", "tensorboard")]
    return WorkerContext("demo", "memory://", "job-1", 3, "node-0", *folders)


def of_rank(context: WorkerContext, monkeypatch: pytest.MonkeyPatch, rank: int, local_rank: int) -> Metrics:
    for name, value in {**context.env(), "RANK": str(rank), "LOCAL_RANK": str(local_rank)}.items():
        monkeypatch.setenv(name, value)
    return Metrics.from_env()


def test_rank_0_appends_a_record_for_each_call(context: WorkerContext, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = of_rank(context, monkeypatch, 0, 0)
    metrics.log(1, {"loss": torch.tensor(0.5, requires_grad=True), "accuracy": 1})
    metrics.log(2, {"loss": float("nan"), "reward": float("inf")})
    records = [json.loads(line) for line in (context.round_dir / METRICS).read_text().splitlines()]
    assert [record.pop("at") > 1e9 for record in records] == [True, True]
    assert records == [
        {"step": 1, "round": 3, "loss": 0.5, "accuracy": 1.0},
        {"step": 2, "round": 3, "loss": None, "reward": None},
    ]


def test_the_progress_of_a_node_is_one_line_that_never_grows(
    context: WorkerContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = of_rank(context, monkeypatch, 2, 0)
    metrics.log(99_999_999, {"loss": 1 / 3, "steps_per_s": 123456.789, "other": 5})
    metrics.progress(7)
    text = (context.round_dir / PROGRESS).read_bytes()
    assert text.count(b"\n") == 1
    progress = msgspec.json.decode(text)
    assert progress.pop("at") > 1e9
    assert progress == {"step": 7, "loss": 1 / 3, "steps_per_s": 123456.789}


@pytest.mark.parametrize(
    ("rank", "local_rank", "written"),
    [(0, 0, {METRICS, PROGRESS}), (2, 0, {PROGRESS}), (1, 1, set())],
)
def test_only_the_ranks_that_should_write_do(
    context: WorkerContext, monkeypatch: pytest.MonkeyPatch, rank: int, local_rank: int, written: set[str]
) -> None:
    of_rank(context, monkeypatch, rank, local_rank).log(1, {"loss": 1})
    assert {path.name for path in context.round_dir.glob("*")} == written
    assert bool(list(context.tensorboard_dir.glob("*"))) == (rank == 0)


def test_outside_of_a_job_nothing_is_written_but_a_file_that_is_asked_for(tmp_path: Path) -> None:
    script = "from gpuctl import log_metrics; log_metrics(4, loss=0.25)"
    plain = {"PATH": os.environ["PATH"]}
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=plain, capture_output=True, check=True)
    assert (done.stdout, done.stderr, list(tmp_path.iterdir())) == (b"", b"", [])

    asked = {**plain, "GPUCTL_METRICS_FILE": str(tmp_path / "metrics.jsonl")}
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=asked, check=True)
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["loss"] == 0.25


def test_logging_metrics_imports_neither_torch_nor_tensorboard() -> None:
    script = "import sys; from gpuctl import log_metrics; log_metrics(1, loss=1); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not {"torch", "tensorboard", "numpy"} & set(done.stdout.split())
