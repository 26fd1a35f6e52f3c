"""Time as an argument, so that a test passes its own."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """The time. Monotonic seconds decide (leases, deadlines); wall-clock seconds are for showing to people only.

    No wall clock is ever compared with that of another machine.
    """

    def monotonic(self) -> float: ...

    def time(self) -> float: ...


class SystemClock:
    """The machine's own clocks."""

    def monotonic(self) -> float:
        return time.monotonic()

    def time(self) -> float:
        return time.time()
