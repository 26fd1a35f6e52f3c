"""What the loop of an agent waits for."""

from __future__ import annotations

import contextlib
import queue


class Wake:
    """A ``threading.Event`` that a signal handler may set: what it has interrupted may hold an event's own lock."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[None] = queue.SimpleQueue()

    def set(self) -> None:
        self._queue.put(None)

    def wait(self, timeout_s: float) -> None:
        """Until somebody has set it since the last call."""
        with contextlib.suppress(queue.Empty):
            self._queue.get(timeout=timeout_s)
            while True:
                self._queue.get_nowait()
