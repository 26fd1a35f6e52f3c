"""What a loop waits for, whatever signals come."""

from __future__ import annotations

import subprocess
import sys
import time

from gpuctl.bootstrap.wake import Wake
from tests.waiting import PATIENCE_S

_FLOODED = """
import signal
from gpuctl.bootstrap.wake import Wake

signal.signal(signal.SIGALRM, lambda *_: sum(range(2000)))
signal.setitimer(signal.ITIMER_REAL, 0.0002, 0.0002)
wake = Wake()
for _ in range(100):
    wake.wait(0.005)
signal.setitimer(signal.ITIMER_REAL, 0)
"""
_WOKEN = """
import signal
from gpuctl.bootstrap.wake import Wake

wake = Wake()
signal.signal(signal.SIGALRM, lambda *_: wake.set())
signal.setitimer(signal.ITIMER_REAL, 0.1)
wake.wait(1e6)
"""


def test_a_signal_that_comes_as_the_time_is_up_does_not_prolong_it() -> None:
    subprocess.run([sys.executable, "-c", _FLOODED], check=True, timeout=30)


def test_a_signal_handler_ends_the_wait() -> None:
    subprocess.run([sys.executable, "-c", _WOKEN], check=True, timeout=PATIENCE_S)


def test_however_often_it_was_set_it_ends_one_wait() -> None:
    wake = Wake()
    for _ in range(3):
        wake.set()
    began = time.monotonic()
    wake.wait(PATIENCE_S)
    assert time.monotonic() - began < PATIENCE_S
    wake.wait(0.01)
    wake.set()
    wake.wait(PATIENCE_S)
    assert time.monotonic() - began < PATIENCE_S
