"""The watch of the GPUs: a real process and NVML's real package, above a stand-in for the driver's library."""

from __future__ import annotations

import os
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuctl.bootstrap.monitors.gpu_health import GpuHealth
from gpuctl.bootstrap.monitors.gpu_watch import GpuWatch
from tests.fakes.nvml import Driver
from tests.waiting import PATIENCE_S

DEVICES = ("GPU 0: NVIDIA H100 (UUID: GPU-0)", "GPU 1: NVIDIA H100 (UUID: GPU-1)")


class Watched:
    def __init__(self, folder: Path) -> None:
        self.driver = Driver(folder)
        self.said: queue.Queue[str] = queue.Queue()
        self.changes: queue.Queue[None] = queue.Queue()
        self.made: list[GpuHealth] = []

    def start(self, *lines: str, **how: Any) -> GpuHealth:
        self.driver.say(*lines)
        env = self.driver.env(os.environ)
        health = GpuHealth(env, DEVICES, lambda: self.changes.put(None), self.said.put, **how)
        self.made.append(health)
        health.start()
        return health

    def await_change(self) -> None:
        self.changes.get(timeout=PATIENCE_S)


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    made = Watched(tmp_path)
    yield made
    for health in made.made:
        health.stop()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("xid 1 79", "GPU 1: it has fallen off the bus (Xid 79)"),
        ("lost 1 1", "GPU 1: it has fallen off the bus"),
        ("ecc 0 3", "GPU 0: 3 uncorrected memory errors"),
        ("rows 0 2", "GPU 0: a row of its memory cannot be remapped"),
    ],
)
def test_an_ill_gpu_is_told_by_name_and_stays_so(watched: Watched, line: str, words: str) -> None:
    health = watched.start(line)
    watched.await_change()
    assert (health.ill, health.warning) == (words, "")
    watched.driver.say("rows 0 1")
    watched.await_change()
    assert health.ill == words and health.warning.endswith("remapped at the next reset")


def test_what_is_only_to_be_told_is_no_illness_and_what_an_application_does_is_nothing(watched: Watched) -> None:
    health = watched.start("xid 0 31", "ecc 0 0", "xid 1 94")
    watched.await_change()
    assert (health.ill, health.warning) == ("", "GPU 1: a memory error that was contained (Xid 94)")


def test_the_driver_that_knows_what_a_gpu_needs_is_believed(watched: Watched) -> None:
    health = watched.start("xid 0 79", "recovery 0 0")
    watched.await_change()
    assert health.ill == "" and "Xid 79" in health.warning


def test_after_a_failure_the_driver_is_given_a_moment(watched: Watched) -> None:
    health = watched.start("rows 0 1")
    watched.await_change()
    watched.driver.say("xid 1 48")
    assert health.settle(PATIENCE_S) == "GPU 1: an uncorrectable memory error (Xid 48)"


def test_a_driver_that_hangs_is_ill_and_nobody_waits_for_it(watched: Watched) -> None:
    health = watched.start("hang 1 1", silent_s=0.3)
    watched.await_change()
    assert health.ill == "the NVIDIA driver has not answered for 0.3 s"


def test_without_a_driver_or_a_gpu_nothing_is_watched(watched: Watched) -> None:
    health = watched.start()
    absent = GpuHealth({**os.environ, "LD_LIBRARY_PATH": ""}, DEVICES, lambda: None, watched.said.put)
    watched.made.append(absent)
    absent.start()
    assert watched.said.get(timeout=PATIENCE_S).startswith("the GPUs are not watched: ")
    none = GpuHealth(os.environ, (), lambda: None, watched.said.put)
    none.start()
    assert (health.ill, absent.ill, none.settle(PATIENCE_S)) == ("", "", "")


class _Hot:
    """NVML of a GPU whose clocks have these ``reasons``."""

    def __init__(self, reasons: int) -> None:
        import pynvml

        self.reasons = reasons
        self._nvml = pynvml

    def __getattr__(self, name: str) -> Any:
        if name == "nvmlDeviceGetCurrentClocksEventReasons":
            return lambda _: self.reasons
        if name == "nvmlDeviceGetTemperature":
            return lambda *_: 91
        if name == "nvmlDeviceGetRemappedRows":
            return lambda _: (0, 0, 0, 0)
        return (
            (lambda *_: 0)
            if name.startswith("nvmlDevice") or name == "nvmlEventSetCreate"
            else getattr(self._nvml, name)
        )


def test_a_gpu_is_throttled_once_it_has_been_for_a_minute_on_end() -> None:
    now, nvml = [0.0], _Hot(0x40)
    watch = GpuWatch(nvml, [0], lambda: now[0])
    told = []
    for at, reasons in ((0, 0x40), (59, 0x40), (60, 0x40), (62, 0), (64, 0x40), (123, 0x40)):
        now[0], nvml.reasons = at, reasons
        watch.look()
        told.append(bool(watch.warning))
    assert told == [False, False, True, False, False, False] and watch.ill == ""
