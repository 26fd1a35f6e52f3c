"""Why a worker was killed with SIGKILL: whether the kernel was out of memory, and how much was in use then.

The kernel tells of each process that its OOM killer ends in its log (``/dev/kmsg``, for root), by pid; and it counts
them (``oom_kill`` in ``/proc/vmstat``, cgroups with a limit included). A process that is gone has no memory any more,
so the use is looked at while it runs.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

_EVERY_S = 0.5
_GIB = 1024**3
_KILLED = re.compile(r"(Memory cgroup out of memory: )?Killed process (\d+) .*?anon-rss:(\d+)kB")
_NO_LIMIT = 1 << 60
"""cgroup v1 has a number of this kind for "no limit"."""


@dataclass(frozen=True, slots=True)
class _Use:
    used: int
    """Bytes, of the machine or of a cgroup of the agent or its workers: whichever is nearest to its limit."""
    limit: int
    workers: dict[int, int]
    """Bytes by pid."""


@dataclass(frozen=True, slots=True)
class _Killed:
    held: int
    """Bytes."""
    of_cgroup: bool
    """The limit of its cgroup was met, and not that of the machine."""


def machine_memory() -> tuple[int, int]:
    """Bytes in use on this machine, and how many it has."""
    memory = psutil.virtual_memory()
    return memory.total - memory.available, memory.total


class MemoryWatch:
    """Looks at a run's memory on a thread of its own, from ``start`` to ``stop``. ``pids``: the workers of now;
    ``machine``: see ``machine_memory``."""

    def __init__(
        self, pids: Callable[[], Sequence[int]], machine: Callable[[], tuple[int, int]] = machine_memory
    ) -> None:
        self._pids = pids
        self._machine = machine
        self._last: _Use | None = None
        self._by_pid: dict[int, _Use] = {}
        """The last use that a worker had a part in: others may take long to end after it, with less in use."""
        self._kills = _oom_kills()
        self._kernel_log = _KernelLog()
        self._ended = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._watch, name="memory", daemon=True).start()

    def stop(self) -> None:
        self._ended.set()

    def look(self) -> None:
        """Note the use of now."""
        workers = {}
        for pid in self._pids():
            with contextlib.suppress(psutil.Error):
                if size := psutil.Process(pid).memory_info().rss:  # a zombie has none
                    workers[pid] = size
        use = _use(self._machine(), workers)
        self._by_pid.update(dict.fromkeys(workers, use))
        if workers or self._last is None:
            self._last = use

    def was_out_of_memory(self) -> bool:
        """Whether the kernel has ended a process on this machine for want of memory since this watch was made."""
        return _oom_kills() > self._kills

    def why_killed(self, pid: int) -> str:
        """Explain who sent SIGKILL to worker ``pid``, as far as can be known. ``pid`` 0: it is not known, as of those
        in a container; then it is the one that the kernel has killed, if it has killed one of them only."""
        killed = self._kernel_log.killed()
        if self._last is None:  # it was gone before the first look
            self.look()
        ours = killed.keys() & self._by_pid.keys()
        if not pid and len(ours) == 1:
            (pid,) = ours
        if pid in killed:
            what = "its cgroup" if killed[pid].of_cgroup else "the machine"
            return f"killed by the kernel, as {what} was out of memory{self._words(pid, killed[pid].held)}"
        if killed or self.was_out_of_memory():
            return f"the kernel ran out of memory and killed a process here{self._words(pid)}"
        return f"not sent by gpuctl: out of memory, or by hand?{self._words(pid)}"

    def _watch(self) -> None:
        while not self._ended.wait(_EVERY_S):
            self.look()

    def _words(self, pid: int, size: int = 0) -> str:
        use = self._by_pid.get(pid, self._last)
        assert use is not None
        size = size or use.workers.get(pid, 0)
        own = f", {size / _GIB:.1f} GiB by this worker" if size else ""
        return f"; {use.used / _GIB:.1f} of {use.limit / _GIB:.1f} GiB were in use{own}"


class _KernelLog:
    """The kernel's log from now on; of one that may not be read, nothing."""

    def __init__(self) -> None:
        self._fd: int | None = None
        self._killed: dict[int, _Killed] = {}
        with contextlib.suppress(OSError):
            self._fd = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._fd, 0, os.SEEK_END)

    def __del__(self) -> None:
        if self._fd is not None:
            os.close(self._fd)

    def killed(self) -> dict[int, _Killed]:
        """Processes that the OOM killer has ended, by pid."""
        if self._fd is None:
            return {}
        with contextlib.suppress(OSError):  # EAGAIN at its end
            while line := os.read(self._fd, 8192):
                if found := _KILLED.search(line.decode(errors="replace")):
                    self._killed[int(found[2])] = _Killed(int(found[3]) * 1024, bool(found[1]))
        return self._killed


def _oom_kills() -> int:
    try:
        found = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) if found else 0


def _use(machine: tuple[int, int], workers: dict[int, int]) -> _Use:
    used, limit = max((machine, *_cgroup_uses(workers)), key=lambda use: use[0] / use[1])
    return _Use(used, limit, workers)


def _cgroup_uses(workers: Iterable[int]) -> set[tuple[int, int]]:
    """(used, limit) of the cgroups that this process and ``workers`` are in, and of those above, that have a limit.
    Source: cgroups(7)."""
    found = set()
    for folder, names in {place for process in ("self", *workers) for place in _cgroups(str(process))}:
        with contextlib.suppress(OSError, ValueError):  # "max"
            used, limit = (int((folder / name).read_text()) for name in names)
            if 0 < limit < _NO_LIMIT:
                found.add((used, limit))
    return found


def _cgroups(process: str) -> Iterator[tuple[Path, tuple[str, str]]]:
    """Folders of a process's cgroups with their files for use and limit."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process}/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if "memory" in controllers.split(","):
                top, names = Path("/sys/fs/cgroup/memory"), ("memory.usage_in_bytes", "memory.limit_in_bytes")
            elif not controllers:
                top, names = Path("/sys/fs/cgroup"), ("memory.current", "memory.max")
            else:
                continue
            folder = top / path.lstrip("/")
            for place in (folder, *folder.parents[: len(folder.parts) - len(top.parts)]):
                yield place, names
