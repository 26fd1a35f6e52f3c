"""Which ranks of a node have not ended, as seen from outside the workers."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import psutil


def ranks_left(log_dir: Path, nproc: int, launcher: int, workers: Iterable[int]) -> tuple[int, ...] | None:
    """Local ranks of the workers that have not ended; ``None`` if none has begun, or it cannot be told.

    A rank prints to a file of its own below ``log_dir``. Once its script has ended, torch has it wait for the others
    of its node, and print where the launcher does.

    Args:
        log_dir: of the launch, where torch puts ``attempt_0/RANK/stdout.log``.
        nproc: how many ranks the node has.
        launcher: pid of the process that started them.
        workers: pids of its children.
    """
    begun = {int(path.parent.name) for path in log_dir.glob("*/attempt_0/*/stdout.log")}
    if not begun:
        return None
    left = {*range(nproc)} - begun
    elsewhere = _stdout(launcher)
    for pid in workers:
        stdout = _stdout(pid)
        if stdout == elsewhere or (stdout is None and not _lives(pid)):
            continue
        if stdout is None or stdout.name != "stdout.log" or not stdout.parent.name.isdigit():
            return None  # the script prints somewhere else
        left.add(int(stdout.parent.name))
    return tuple(sorted(left))


def _stdout(pid: int) -> Path | None:
    """Where a process prints to (Linux); ``None`` if it is gone, or prints nowhere."""
    try:
        return Path(f"/proc/{pid}/fd/1").readlink()
    except OSError:
        return None


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
