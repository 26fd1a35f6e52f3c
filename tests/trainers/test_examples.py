"""The examples, as a reader would start them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gloo_lines import without_gloo
from tests.paths import ROOT
from tests.waiting import until

EXAMPLES = ROOT / "examples"
PYTHON = (sys.executable,)
ABORTED = "terminate called without an active exception"
"""What a script that imports nothing of ours may end with under plain torchrun: docs/decisions/0019."""
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def begin(
    launcher: tuple[str, ...], script: str, *options: object, metrics: Path | None = None
) -> subprocess.Popen[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", **({"GPUCTL_METRICS_FILE": str(metrics)} if metrics else {})}
    command = [*launcher, str(EXAMPLES / script), *map(str, options)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def start(launcher: tuple[str, ...], script: str, *options: object, metrics: Path | None = None) -> str:
    """What the script prints to stdout."""
    with begin(launcher, script, *options, metrics=metrics) as process:
        try:
            printed, said = process.communicate(timeout=120)
        finally:
            process.terminate()  # torchrun ends its workers then
    assert process.returncode == 0, said
    return without_gloo(printed)


def steps_in(metrics: Path) -> list[int]:
    return [json.loads(line)["step"] for line in metrics.read_text().splitlines()]


@pytest.mark.slow
def test_digits_goes_on_under_torchrun_where_python_left_off(tmp_path: Path) -> None:
    place = ("--checkpoints", tmp_path / "kept", "--checkpoint-every", 20)
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    begun = start(PYTHON, "digits.py", "--steps", 20, *place, metrics=first)
    ended = start(TORCHRUN, "digits.py", "--steps", 80, *place, "--out", tmp_path / "weights.pt", metrics=second)
    before, after = (float(accuracy) for accuracy in re.findall(r"^accuracy=(0\.\d{4})$", begun + ended, re.MULTILINE))
    assert after > max(before, 0.8)
    # The accuracy is a record of its own.
    assert steps_in(first) == [1, 10, 20, 20]
    assert steps_in(second) == [21, *range(30, 81, 10), 80]
    assert (tmp_path / "weights.pt").stat().st_size > 10_000


@pytest.mark.slow
def test_charlm_is_asked_to_stop_and_goes_on_under_torchrun(tmp_path: Path) -> None:
    place = ("--checkpoints", tmp_path / "kept", "--checkpoint-every", 1000, "--batch", 8, "--steps", 60)
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    with begin(PYTHON, "charlm.py", *place, metrics=first) as process:
        try:
            until(lambda: first.exists() and len(steps_in(first)) >= 3, "three steps")
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()
    stopped = steps_in(first)[-1]
    assert stopped < 60
    assert "\ndef " in start(TORCHRUN, "charlm.py", *place, metrics=second)
    assert steps_in(second) == list(range(stopped + 1, 61))


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [PYTHON, TORCHRUN], ids=["python", "torchrun"])
def test_plain_ddp_learns(launcher: tuple[str, ...]) -> None:
    try:
        printed = start(launcher, "plain_ddp.py")
    except AssertionError as error:
        if ABORTED not in str(error):
            raise
        printed = start(launcher, "plain_ddp.py")
    losses = re.findall(r"^step \d+ loss (\d\.\d+)$", printed, re.MULTILINE)
    assert len(losses) == 5, "one rank prints"
    assert float(losses[-1]) < 0.5 * float(losses[0])


@pytest.mark.slow
def test_diloco_goes_on_under_torchrun_where_python_left_off(tmp_path: Path) -> None:
    place = ("--checkpoints", tmp_path / "kept", "--every", 20)
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    start(PYTHON, "diloco.py", "--steps", 200, *place, metrics=first)
    printed = start(TORCHRUN, "diloco.py", "--steps", 810, *place, metrics=second)
    assert printed.startswith("right: ") and float(printed.split()[1]) > 0.9, "one worker prints"
    assert steps_in(first) == list(range(20, 201, 20))
    assert steps_in(second)[0] == 220


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["diloco:every=10", "topk:ratio=0.1"])
def test_charlm_trains_with_a_strategy(strategy: str, tmp_path: Path) -> None:
    place = ("--checkpoints", tmp_path / "kept", "--batch", 8, "--strategy", strategy)
    losses = re.findall(r"loss (\d\.\d+)$", start(TORCHRUN, "charlm.py", "--steps", 100, *place), re.MULTILINE)
    assert len(losses) == 2 and float(losses[1]) < float(losses[0]) < 5.0
    assert len(re.findall("loss", start(TORCHRUN, "charlm.py", "--steps", 150, *place))) == 1, "it goes on"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts what a socket carries")
def test_collectives_prints_what_its_page_shows() -> None:
    page = (ROOT / "docs/concepts/collectives.md").read_text()
    shown = re.search(
        r"^\$ torchrun --nproc-per-node 4 examples/collectives.py\n(.+?)^```", page, re.MULTILINE | re.DOTALL
    )
    assert shown and start((*TORCHRUN[:-1], "4"), "collectives.py") == shown[1]
