"""Who goes when memory runs out: the bench, which needs the most of it and matters the least."""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path

import psutil

GIB = 1 << 30


def go_first() -> None:
    """Should the kernel have to kill a process, it is this one."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def limit(most: int) -> None:
    """Bytes that this process may have at most, whatever goes wrong in it."""
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def check_memory(needed: int) -> None:
    """Raises ``MemoryError`` if the machine has less than ``needed`` bytes to give away now."""
    available = psutil.virtual_memory().available
    if available < needed:
        raise MemoryError(f"{available / GIB:.1f} GiB of memory are free, {needed / GIB:.1f} are needed; try --fast")
