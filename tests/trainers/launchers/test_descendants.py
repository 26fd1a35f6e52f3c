"""Finding the processes of a job."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from gpuctl.trainers.launchers.descendants import MARK, end_marked

SLEEP = [sys.executable, "-c", "print(flush=True); __import__('time').sleep(1000)"]


@pytest.fixture
def started() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def sleeper(stack: ExitStack, mark: str | None) -> subprocess.Popen[bytes]:
    """A process that has begun, in a session of its own."""
    env = {name: value for name, value in os.environ.items() if name != MARK} | ({MARK: mark} if mark else {})
    process = subprocess.Popen(SLEEP, env=env, start_new_session=True, stdout=subprocess.PIPE)
    stack.callback(process.wait)
    stack.callback(process.kill)
    assert process.stdout
    assert process.stdout.readline() == b"\n"
    return process


def test_the_processes_of_a_round_end_and_no_others(started: ExitStack, tmp_path: Path) -> None:
    mine = tmp_path / "jobs/train-1/rounds/000001"
    ours = sleeper(started, str(mine))
    others = [
        sleeper(started, mark) for mark in (None, str(tmp_path / "jobs/train-1/rounds/000002"), f"{mine}0", f"{mine}/x")
    ]
    assert end_marked(lambda folder: folder == mine) == []
    assert ours.wait(10) == -9
    assert [process.poll() for process in others] == [None] * 4
