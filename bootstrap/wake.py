"""What the loop of an agent waits for."""

from __future__ import annotations

import contextlib
import threading


class Wake:
    """A ``threading.Event`` that a signal handler may set: what it has interrupted may hold an event's own lock.

    Not a ``queue.SimpleQueue``: up to Python 3.12 its ``get`` may wait without end if a signal comes as its time is up.
    """

    def __init__(self) -> None:
        self._unset = threading.Lock()
        self._unset.acquire()

    def set(self) -> None:
        with contextlib.suppress(RuntimeError):  # it is set already
            self._unset.release()

    def wait(self, timeout_s: float) -> None:
        """Until somebody has set it since the last call."""
        self._unset.acquire(timeout=timeout_s)
