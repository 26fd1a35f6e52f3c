"""SIGTERM and SIGHUP while a cloud is being changed: both are what Ctrl-C is.

A cancelled CI run sends the one, a closed terminal or a lost connection the other. Without this they end the process at
once, in the middle of whatever the cloud is asked for.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from gpuctl.cluster.errors import INTERRUPTED, GpuctlError

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


class Interrupted(GpuctlError):
    """Ctrl-C, or a signal that is treated as one."""

    def __init__(self, message: str, exit_code: int = INTERRUPTED) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Terminated(KeyboardInterrupt):
    """The process was told to end by a signal other than Ctrl-C."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


@contextmanager
def as_interrupts() -> Iterator[None]:
    """Context in which SIGTERM and SIGHUP raise ``Terminated``, and what is raised because of that has its exit code.
    One that was ignored from the start, as by ``nohup``, stays ignored."""
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    received: list[int] = []

    def interrupt(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        if number == signal.SIGHUP:
            _leave_terminal()
        raise Terminated(number)

    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, interrupt)
    try:
        yield
    except GpuctlError as error:
        if received and error.exit_code == INTERRUPTED:
            error.exit_code = Terminated(received[0]).exit_code
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave_terminal() -> None:
    """It is gone, and whatever is written to it from now on would fail."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if stream.isatty():
            os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
