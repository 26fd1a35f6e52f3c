"""Waiting for a condition, with a deadline."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

PATIENCE_S = float(os.environ.get("GPUCTL_TEST_PATIENCE_S", "300"))
"""For all that succeeds late on a busy machine: it only keeps a test from hanging. pytest's ``timeout`` is longer."""


class TookTooLong(Exception):
    """What was waited for did not happen before the deadline."""


def until(condition: Callable[[], T | None], what: str, patience_s: float = PATIENCE_S) -> T:
    """The first true value of ``condition``. Raises ``TookTooLong``."""
    deadline = time.monotonic() + patience_s
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise TookTooLong(f"timed out after {patience_s:g} s waiting for {what}")
        time.sleep(0.01)
    return found
