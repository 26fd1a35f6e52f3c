"""The processes of a job on a node, also those that left its session: a child started with ``setsid`` would hold a GPU
while the next job runs.

Three ways find them. On machines of their own a job's processes are in a cgroup, which none of them leaves by itself
(``bootstrap.launch.job_cgroup``). Elsewhere a process that ``adopt_orphans`` becomes the parent of whatever is left
below it; and everything that a worker starts has the worker's ``GPUCTL_ROUND_DIR`` in its environment, which names the
node, the job and the round. Only one that escapes both, with an environment of its own and no interpreter above it, is
not found.

A fourth one finds who keeps a worker's end from being seen: see ``torchrun.end_leftovers``.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import stat
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from multiprocessing.connection import wait
from pathlib import Path

import psutil

MARK = "GPUCTL_ROUND_DIR"
_PATIENCE_S = 5.0
"""For killed processes to be gone: one gives back a GPU's memory first, another hangs in a driver for ever."""
_LOOK_S = 0.01


def children_of(pid: int) -> list[int]:
    """Pids, oldest first; none if that process is gone."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        pass  # gone, or a system that does not tell so cheaply
    try:
        return [child.pid for child in psutil.Process(pid).children()]
    except psutil.NoSuchProcess:
        return []


def enter(cgroup: str) -> None:
    """Enter the cgroup with this folder, and so all that this process starts; as far as that is possible."""
    if cgroup:
        with contextlib.suppress(OSError):
            (Path(cgroup) / "cgroup.procs").write_text("0")


def adopt_orphans() -> None:
    """Adopt orphans: from now on a process below this one whose parent ends becomes a child of this one (Linux,
    prctl(2))."""
    if sys.platform == "linux":
        import ctypes

        pr_set_child_subreaper = 36
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_child_subreaper, 1, 0, 0, 0)


def end_orphans(spare: Collection[int], patience_s: float = _PATIENCE_S) -> None:
    """Kill and reap this process's children but those in ``spare``, and what they leave to it in turn."""
    deadline = time.monotonic() + patience_s
    while (orphans := [pid for pid in children_of(os.getpid()) if pid not in spare]) and time.monotonic() < deadline:
        _kill(orphans)
        for pid in orphans:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(_LOOK_S)


def end_marked(is_ours: Callable[[Path], bool], patience_s: float = _PATIENCE_S) -> list[int]:
    """Kill the processes for whose ``GPUCTL_ROUND_DIR`` ``is_ours``; returns those that live on all the same."""
    deadline = time.monotonic() + patience_s
    while (found := _marked(is_ours)) and time.monotonic() < deadline:
        _kill(found)
        time.sleep(_LOOK_S)
    return found


def end_holders(pipe: int, patience_s: float = _PATIENCE_S) -> None:
    """Kill the processes that have the write end of ``pipe`` open, of which this one reads (Linux)."""
    deadline = time.monotonic() + patience_s
    name = os.readlink(f"/proc/self/fd/{pipe}")  # noqa: PTH115
    while not wait([pipe], 0) and time.monotonic() < deadline:
        _kill(_writers_of(name))
        time.sleep(_LOOK_S)


def _writers_of(pipe: str) -> list[int]:
    """Also workers have the read end: they are forked from the process that reads."""
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(OSError):
            fds = [one.path for one in os.scandir(f"/proc/{pid}/fd") if os.readlink(one.path) == pipe]  # noqa: PTH115
            if pid != os.getpid() and any(os.lstat(fd).st_mode & stat.S_IWUSR for fd in fds):
                found.append(pid)
    return found


def _marked(is_ours: Callable[[Path], bool]) -> list[int]:
    return [pid for pid, mark in _marks() if is_ours(Path(mark)) and pid != os.getpid()]


def _marks() -> Iterator[tuple[int, str]]:
    """The mark of each process that has one, if it is this user's. A node has a thousand processes, and the next round
    waits for this: psutil takes five times as long."""
    if sys.platform != "linux":
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if mark := process.environ().get(MARK):
                    yield process.pid, mark
        return
    name = f"{MARK}=".encode()
    for pid in psutil.pids():
        with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as environ:  # noqa: PTH123
            found = [one for one in environ.read().split(b"\0") if one.startswith(name)]
            if found:
                yield pid, os.fsdecode(found[0].removeprefix(name))


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def catches(pid: int, number: int = signal.SIGTERM) -> bool:
    """Whether process ``pid`` has a handler for signal ``number`` (Linux)."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii") as status:  # noqa: PTH123
            caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", status.read(), re.MULTILINE)
    except OSError:
        return False
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)
