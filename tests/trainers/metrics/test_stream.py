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

from gpuctl.cluster.worker_context import METRICS, PROGRESS, WorkerContext
from gpuctl.trainers.metrics.stream import Metrics
from tests.fakes.small_disk import mounted


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


def test_the_progress_of_a_training_whose_length_is_known_tells_it(
    context: WorkerContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = of_rank(context, monkeypatch, 0, 0)
    metrics.steps = 2000
    metrics.log(7, {"loss": 1.0})
    progress = json.loads((context.round_dir / PROGRESS).read_bytes())
    assert (progress["step"], progress["steps"], progress["loss"]) == (7, 2000, 1.0)


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


LOOP = """
import sys, time
import torch
from gpuctl import Checkpointer, log_metrics
from gpuctl.trainers.metrics import stream

stream.time = clock = type("Clock", (), {"now": 1e9, "time": staticmethod(lambda: clock.now)})
checkpointer = Checkpointer(sys.argv[1])
for step in range(1, 26):
    clock.now += 0.25
    if sys.argv[2] == "logs" and step % 10 == 0:
        log_metrics(step, loss=1 / step)
    if sys.argv[2] == "saves":
        checkpointer.save(step, {"count": step})
    else:
        checkpointer.step(step, {"count": step})
"""


@pytest.mark.slow
@pytest.mark.parametrize("logs", ["silent", "logs", "saves"])
def test_a_loop_with_a_checkpointer_tells_of_its_steps_whether_it_logs_or_not(
    context: WorkerContext, tmp_path: Path, logs: str
) -> None:
    env = {**os.environ, **context.env(), "RANK": "0", "LOCAL_RANK": "0"}
    subprocess.run([sys.executable, "-c", LOOP, str(tmp_path / "saved"), logs], env=env, check=True, timeout=120)
    progress = json.loads((context.round_dir / PROGRESS).read_bytes())
    assert (progress["step"], progress["steps_per_s"]) == (25, 4.0)
    records = [json.loads(line) for line in (context.round_dir / METRICS).read_text().splitlines()]
    if logs == "logs":
        assert progress["loss"] == 0.05
        # One before the script has logged anything, as far as anybody knew.
        assert [record["step"] for record in records if "loss" in record] == [10, 20]
    else:
        assert [record["step"] for record in records] == [1, 5, 9, 13, 17, 21, 25]
        assert records[-1] == {"step": 25, "at": 1e9 + 25 / 4, "round": 3, "steps_per_s": 4.0}
        assert not context.tensorboard_dir.exists(), "there is nothing to draw"


def test_a_loop_that_counts_its_steps_from_0_and_logs_each_is_left_to_it(
    context: WorkerContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = of_rank(context, monkeypatch, 0, 0)
    for step in range(3):
        metrics.log(step, {"loss": 1.0})
        metrics.stepped(step + 1)
        assert json.loads((context.round_dir / PROGRESS).read_bytes())["step"] == step
    assert len((context.round_dir / METRICS).read_text().splitlines()) == 3


def test_a_disk_without_room_costs_the_metrics_and_not_the_training(
    context: WorkerContext, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Memory of a file that has no room on its disk would end the process when it is written to."""
    context.round_dir.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(context.round_dir)], capture_output=True
    )
    if done.returncode:
        pytest.skip(f"needs the right to mount: {done.stderr.decode().strip()}")
    try:
        (context.round_dir / "ballast").write_bytes(b"x" * 4096)
        metrics = of_rank(context, monkeypatch, 0, 0)
        metrics.stepped(1)
        metrics.stepped(2)
        assert "No space left on device" in capsys.readouterr().err
    finally:
        subprocess.run(["umount", "-l", str(context.round_dir)], check=False)


def test_records_that_a_disk_has_no_room_for_are_dropped_and_none_is_torn(
    context: WorkerContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    with mounted(context.round_dir, "16k") as disk:
        metrics = of_rank(context, monkeypatch, 0, 0)
        ballast = disk / "ballast"
        ballast.write_bytes(b"x" * 4096)
        for step in range(1000):
            metrics.log(step, {"loss": 1.0})
        assert (disk / METRICS).stat().st_size == 2 * 4096, "what the progress and the ballast leave"
        ballast.unlink()
        metrics.log(1000, {"loss": 2.0})
        steps = [json.loads(line)["step"] for line in (disk / METRICS).read_text().splitlines()]
        assert steps[-1] == 1000 and steps[:-1] == [*range(len(steps) - 1)]


def test_events_that_a_disk_has_no_room_for_are_dropped(
    context: WorkerContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    with mounted(context.tensorboard_dir, "8k"):
        metrics = of_rank(context, monkeypatch, 0, 0)
        for step in range(1000):
            metrics.log(step, {"loss": 1.0})
        assert len((context.round_dir / METRICS).read_text().splitlines()) == 1000
