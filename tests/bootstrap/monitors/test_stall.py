"""When a node counts its job as stalled."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from threading import Event

import psutil
import pytest

from gpuctl.bootstrap.monitors.stall import Activity, StallTimer, StallWatch, cpu_seconds
from gpuctl.cluster.clock import SystemClock

AFTER_S = 1800.0
Does = Callable[[float], Activity | None]
"""What there is of a job, by the seconds since it began."""


def _stalled_at(
    does: Does, gpu: Callable[[float], float] = lambda _: 0.0, until_s: float = 3 * AFTER_S
) -> float | None:
    now = [0.0]
    stall = StallTimer(AFTER_S, lambda: gpu(now[0]))
    while now[0] < until_s:
        if stall.look(5000.0 + now[0], does(now[0])):
            return now[0]
        now[0] += 10.0
    return None


def _steps(now: float) -> int:
    return int(now / 60)


def test_without_a_step_and_without_work_a_job_is_stalled_after_its_time() -> None:
    assert _stalled_at(lambda _: Activity(2, 7, 100.0)) == pytest.approx(AFTER_S, abs=10)
    hangs_at_600 = _stalled_at(lambda now: Activity(2, min(_steps(now), 10), 3.0))
    assert hangs_at_600 == pytest.approx(AFTER_S + 600, abs=20)


def test_a_job_that_steps_is_not_stalled_however_little_it_does_for_it() -> None:
    assert _stalled_at(lambda now: Activity(2, _steps(now), 3.0)) is None


def test_a_job_whose_gpu_or_cpu_works_is_not_stalled_however_long_its_step_takes() -> None:
    assert _stalled_at(lambda _: Activity(2, None, 0.0), gpu=lambda _: 60.0) is None
    assert _stalled_at(lambda now: Activity(2, None, now)) is None


def test_threads_that_only_look_around_are_no_work() -> None:
    assert _stalled_at(lambda now: Activity(8, 7, 8 * 0.01 * now)) is not None
    assert _stalled_at(lambda now: Activity(8, 7, 8 * 0.2 * now)) is None


def test_a_job_without_steps_is_judged_by_its_work_alone() -> None:
    assert _stalled_at(lambda now: Activity(1, None, min(now, 600.0))) == pytest.approx(AFTER_S + 600, abs=20)


def test_what_has_no_workers_yet_is_not_stalled() -> None:
    assert _stalled_at(lambda _: None) is None
    assert _stalled_at(lambda now: Activity(1, None, 0.0) if now >= 900 else None) == pytest.approx(
        AFTER_S + 900, abs=20
    )


def test_a_moment_of_work_starts_the_time_anew() -> None:
    assert _stalled_at(lambda _: Activity(1, None, 0.0), gpu=lambda now: 50.0 if now == 1200 else 0.0) == pytest.approx(
        AFTER_S + 1200, abs=20
    )


def test_a_worker_that_ends_is_something_that_happens() -> None:
    """What it has used is gone with it, so that the others' work alone would look like less than none."""
    ends_at_900 = _stalled_at(lambda now: Activity(2, 7, 500.0) if now < 900 else Activity(1, 7, 200.0))
    assert ends_at_900 == pytest.approx(AFTER_S + 900, abs=20)


def test_gpus_are_asked_only_where_nothing_else_goes_on() -> None:
    def asked() -> float:
        raise AssertionError

    stall = StallTimer(AFTER_S, asked)
    for now in range(0, 600, 10):
        assert not stall.look(now, Activity(1, now, 0.0))


def test_the_cpu_time_of_workers_is_that_of_all_they_start() -> None:
    spin = "import subprocess,sys,time; subprocess.run([sys.executable, '-c', 'while True: pass'])"
    with subprocess.Popen([sys.executable, "-c", spin]) as worker:
        try:
            deadline = time.monotonic() + 30
            while cpu_seconds([worker.pid]) < 0.5:
                assert time.monotonic() < deadline
                time.sleep(0.02)
        finally:
            for child in psutil.Process(worker.pid).children():
                child.kill()
            worker.kill()
    assert cpu_seconds([worker.pid]) == 0.0


class _Hangs:
    def activity(self) -> Activity:
        return Activity(1, 3, 0.0)


def test_the_watch_says_so_once_and_wakes_the_agent() -> None:
    said: list[str] = []
    woken = Event()
    watch = StallWatch(_Hangs(), 0.2, SystemClock(), woken.set, said.append)
    watch.start()
    try:
        assert woken.wait(20) and watch.stalled
        assert said == ["stalled: no step and no work for 0.00333333 minutes"]
    finally:
        watch.stop()


def test_after_zero_minutes_nothing_counts_as_stalled_and_its_time_is_measured_all_the_same() -> None:
    stall = StallTimer(0.0, lambda: 0.0)
    assert [stall.look(now, Activity(1, 3, 0.0)) for now in (5.0, 15.0, 3600.0)] == [False] * 3
    assert stall.still_s == 3595.0
    assert not stall.look(3610.0, Activity(1, 4, 0.0)) and stall.still_s == 0.0
