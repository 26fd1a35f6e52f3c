"""What a worker tells people, beside what the script prints."""

from __future__ import annotations

import contextlib
import sys
import threading
import time

from gpuctl.cluster.errors import GpuctlError

_LOOK_S = 0.1
"""How soon after the script's end an error is told that it never asked about."""


def say(text: str) -> None:
    """Print a line to standard error. The disk that takes it may be the one that is full."""
    with contextlib.suppress(OSError):
        print(f"gpuctl: {text}", file=sys.stderr, flush=True)


class UnheardError:
    """An error in the background that the script may never ask about.

    Whoever waits, or makes another step, is told by an exception. A script that ends without either is not, and its
    exit code says nothing: then a line does.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._error: GpuctlError | None = None

    def put(self, error: GpuctlError) -> None:
        """Print ``error`` at the script's end, or when ``tell`` is called."""
        self._error = error
        if threading.main_thread().is_alive():
            threading.Thread(target=self._tell_at_the_end, name="gpuctl-unheard").start()
        else:
            self.tell()

    def drop(self) -> None:
        """Forget it: the script has heard of it."""
        self._error = None

    def tell(self) -> None:
        """Print it, if there is one."""
        with self._lock:
            error, self._error = self._error, None
        if error is not None:
            say(str(error))

    def _tell_at_the_end(self) -> None:
        while self._error is not None and threading.main_thread().is_alive():
            time.sleep(_LOOK_S)
        self.tell()
