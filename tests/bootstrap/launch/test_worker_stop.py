"""Who is signalled when a round ends, and when what still runs is killed."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from gpuctl.bootstrap.launch.worker_stop import WorkerStop
from gpuctl.trainers.launchers.descendants import catches
from gpuctl.trainers.stack_signal import STACK_SIGNAL
from tests.fakes.clock import HandClock
from tests.waiting import until

NOTES = """
import os, signal, sys
def note(number, frame):
    with open(f"{sys.argv[1]}/{os.getpid()}", "a") as file:
        print(number, file=file, flush=True)
for number in sys.argv[2:]:
    signal.signal(int(number), note)
print("on", flush=True)
while True:
    signal.pause()
"""
NOBODY = 1 << 22
"""No process has a pid so high."""
Start = Callable[..., int]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """A process that notes the signals named, in a file named for its pid; returns the pid."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*signals: int) -> int:
        process = subprocess.Popen(
            [sys.executable, "-c", NOTES, str(tmp_path), *map(str, signals)], stdout=subprocess.PIPE
        )
        started.append(process)
        assert process.stdout is not None and process.stdout.readline()
        return process.pid

    yield start
    for process in started:
        process.kill()
        process.communicate()


def noted(tmp_path: Path, pid: int) -> list[int]:
    path = tmp_path / str(pid)
    return [int(number) for number in path.read_text().split()] if path.exists() else []


def stop_in_30_s(clock: HandClock) -> WorkerStop:
    return WorkerStop(clock, clock.monotonic() + 30.0, catches)


def test_each_worker_that_listens_is_asked_once_and_others_go_on(tmp_path: Path, start: Start) -> None:
    listens, other = start(signal.SIGTERM), start(signal.SIGHUP)
    stop = stop_in_30_s(HandClock())
    for _ in range(2):
        assert not stop.ask([listens, other], launched=True, everyone=False, stacks=False)
    until(lambda: noted(tmp_path, listens), "it to be asked")
    late = start(signal.SIGTERM)
    assert not stop.ask([listens, other, late], launched=True, everyone=False, stacks=False)
    until(lambda: noted(tmp_path, late), "the late one to be asked")
    assert noted(tmp_path, listens) == [signal.SIGTERM]
    assert stop.has_asked and _lives(other)


def test_workers_are_asked_by_the_signal_of_their_launcher(tmp_path: Path, start: Start) -> None:
    listens = start(signal.SIGUSR1, signal.SIGTERM)
    stop = stop_in_30_s(HandClock())
    assert not stop.ask([listens], launched=True, everyone=False, stacks=False, number=signal.SIGUSR1)
    until(lambda: noted(tmp_path, listens), "it to be asked")
    assert noted(tmp_path, listens) == [signal.SIGUSR1]


def test_the_end_of_a_job_is_for_those_too_that_do_not_listen(start: Start) -> None:
    other = start()
    stop = stop_in_30_s(HandClock())
    assert not stop.ask([other], launched=True, everyone=True, stacks=False)
    until(lambda: not _lives(other), "its end")


@pytest.mark.skipif(not STACK_SIGNAL, reason="there is no signal for stacks here")
def test_a_stack_is_asked_for_before_the_end(tmp_path: Path, start: Start) -> None:
    shows, clock = start(signal.SIGTERM, STACK_SIGNAL), HandClock()
    stop = stop_in_30_s(clock)
    assert not stop.ask([shows], launched=True, everyone=True, stacks=True)
    until(lambda: noted(tmp_path, shows), "it to be asked for its stack")
    clock.now += 1.0
    assert not stop.ask([shows], launched=True, everyone=True, stacks=True)
    until(lambda: len(noted(tmp_path, shows)) > 1, "it to be asked to end")
    assert noted(tmp_path, shows) == [STACK_SIGNAL, signal.SIGTERM]


def test_nobody_is_waited_for_after_the_deadline() -> None:
    clock = HandClock()
    stop = stop_in_30_s(clock)
    clock.now += 29.0
    assert not stop.ask([NOBODY], launched=True, everyone=False, stacks=False)
    clock.now += 2.0
    assert stop.ask([NOBODY], launched=True, everyone=False, stacks=False)


@pytest.mark.parametrize(
    ("launched", "everyone", "is_over"),
    [(True, True, True), (True, False, False), (False, True, False)],
    ids=["the job ends", "another round comes", "it still starts"],
)
def test_a_launcher_without_workers_is_not_waited_for_where_the_job_ends(
    launched: bool, everyone: bool, is_over: bool
) -> None:
    clock = HandClock()
    stop = stop_in_30_s(clock)
    assert not stop.ask([], launched=launched, everyone=everyone, stacks=False)
    clock.now += 2.5
    assert stop.ask([], launched=launched, everyone=everyone, stacks=False) == is_over


def _lives(pid: int) -> bool:
    return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
