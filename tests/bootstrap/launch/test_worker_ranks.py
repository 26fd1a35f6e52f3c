"""Which ranks have not ended, told by where their processes print to."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpuctl.bootstrap.launch.worker_ranks import ranks_left
from tests.waiting import until

SLEEPS = [sys.executable, "-c", "import time; time.sleep(1000)"]
Start = Callable[..., int]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """A process that prints to a file below the folder; returns its pid."""
    started: list[subprocess.Popen[bytes]] = []

    def start(file: str, command: list[str] = SLEEPS) -> int:
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as output:
            started.append(subprocess.Popen(command, stdout=output))
        return started[-1].pid

    yield start
    for process in started:
        process.kill()
        process.wait()


def log(rank: int) -> str:
    return f"job_x/attempt_0/{rank}/stdout.log"


def test_before_a_rank_has_begun_nothing_is_known(tmp_path: Path, start: Start) -> None:
    launcher = start("launcher.log")
    assert ranks_left(tmp_path, 2, launcher, [start("launcher.log")]) is None


def test_ranks_that_run_or_have_not_begun_are_left(tmp_path: Path, start: Start) -> None:
    launcher = start("launcher.log")
    assert ranks_left(tmp_path, 3, launcher, [start(log(1)), start(log(0)), start("launcher.log")]) == (0, 1, 2)


def test_one_whose_script_has_ended_prints_where_the_launcher_does_and_is_not_left(
    tmp_path: Path, start: Start
) -> None:
    launcher, runs = start("launcher.log"), start(log(0))
    start(log(1))  # its file is there
    assert ranks_left(tmp_path, 2, launcher, [runs, start("launcher.log")]) == (0,)


def test_one_that_is_gone_or_that_nobody_has_waited_for_is_not_left(tmp_path: Path, start: Start) -> None:
    launcher, runs, zombie = start("launcher.log"), start(log(0)), start(log(1), [sys.executable, "-c", ""])
    until(lambda: "Z" in Path(f"/proc/{zombie}/stat").read_text().rpartition(")")[2], "its end")
    assert ranks_left(tmp_path, 2, launcher, [runs, zombie, 1 << 22]) == (0,)
    assert ranks_left(tmp_path, 2, launcher, []) == ()


def test_nothing_is_known_of_a_script_that_prints_somewhere_else(tmp_path: Path, start: Start) -> None:
    launcher, runs = start("launcher.log"), start(log(0))
    start(log(1))
    assert ranks_left(tmp_path, 2, launcher, [runs, start("of-its-own")]) is None
