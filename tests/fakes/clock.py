"""Time that a test moves."""

from __future__ import annotations


class HandClock:
    """Stands still until a test moves ``now``; a ``gpuctl.cluster.clock.Clock``."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now
