"""What is removed of a run that was killed, and what is not."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests import leftovers
from tests.paths import ROOT
from tests.waiting import PATIENCE_S

Start = Callable[[str], "subprocess.Popen[str]"]
SLEEPS = [sys.executable, "-c", "import time; print('on', flush=True); time.sleep(1000)"]


@pytest.fixture
def killed_run() -> str:
    """The name of a run whose process is gone."""
    process = subprocess.Popen(SLEEPS, stdout=subprocess.PIPE)
    name = f"{process.pid}:{psutil.Process(process.pid).create_time():.2f}"
    process.kill()
    process.communicate()
    return name


@pytest.fixture
def start() -> Iterator[Start]:
    started = []

    def start(run: str) -> subprocess.Popen[str]:
        env = {**os.environ, leftovers.RUN: run}
        process = subprocess.Popen(SLEEPS, env=env, stdout=subprocess.PIPE, text=True, start_new_session=True)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "on\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_processes_of_a_killed_run_are_ended_and_no_others(start: Start, tmp_path: Path, killed_run: str) -> None:
    left, mine = start(killed_run), start(os.environ[leftovers.RUN])
    assert f"process {left.pid}" in leftovers.sweep(tmp_path)
    left.wait(PATIENCE_S)
    assert mine.poll() is None
    assert f"process {mine.pid}" not in leftovers.sweep(tmp_path)


def test_a_pid_that_is_somebody_elses_by_now_is_not_the_run(start: Start, tmp_path: Path) -> None:
    left = start(f"{os.getpid()}:1.00")
    assert f"process {left.pid}" in leftovers.sweep(tmp_path)


def test_mounts_below_the_folder_of_a_killed_run_are_taken_away(tmp_path: Path, killed_run: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    places = [tmp_path / run / "disk" for run in ("killed", "mine")]
    for place, run in zip(places, (killed_run, os.environ[leftovers.RUN]), strict=True):
        place.mkdir(parents=True)
        (place.parent / "run-of-the-tests").write_text(run)
        if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(place)], check=False).returncode:
            pytest.skip("mounting is not allowed here")
    try:
        assert leftovers.sweep(tmp_path) == [f"mount {places[0]}"]
        assert [place.is_mount() for place in places] == [False, True]
    finally:
        subprocess.run(["umount", "--lazy", str(places[1])], check=True)


def test_a_second_run_waits_for_the_first_and_goes_on_when_that_is_killed(tmp_path: Path) -> None:
    script = (
        "import sys, time, pathlib; from tests.leftovers import alone\n"
        "with alone(pathlib.Path(sys.argv[1])): print('on', flush=True); time.sleep(1000)"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "lock")]
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(_running(command))
        assert first.stdout is not None and first.stdout.readline() == "on\n"
        second = stack.enter_context(_running(command))
        assert second.stderr is not None and second.stdout is not None
        assert second.stderr.readline() == "waits for another run of the tests on this machine to end\n"
        first.kill()
        assert second.stdout.readline() == "on\n"


@contextlib.contextmanager
def _running(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()
