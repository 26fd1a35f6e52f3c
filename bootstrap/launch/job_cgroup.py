"""A cgroup for the processes of a round: none of them leaves it by itself, whatever session, environment and parent it
gives itself, so all can be found and ended.

Only below the agent's own service, which systemd leaves to it (``Delegate=yes``). Local nodes, and those who may not
make one, do without: see ``trainers.launchers.descendants``. Containers have a PID namespace, which does as much.

Sources: cgroups(7); docs.kernel.org/admin-guide/cgroup-v2 (``cgroup.kill`` is of Linux 5.14).
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

SERVICE = "gpuctl-agent.service"
_PREFIX = "round-"
_PATIENCE_S = 5.0
"""As in ``descendants``: a process that hangs in a driver lives on for ever."""
_LOOK_S = 0.01


def delegated(own: Path = Path("/proc/self/cgroup"), top: Path = Path("/sys/fs/cgroup")) -> Path | None:
    """The folder of the agent's own cgroup, in cgroup v2 or else in systemd's hierarchy of v1; ``None`` if it is not
    its own to divide. Both exist on a "hybrid" system, where systemd looks after the first only if that is mounted."""
    places = {}
    with contextlib.suppress(OSError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            places[controllers] = path.lstrip("/")
    for controllers, folder in (("", top), ("", top / "unified"), ("name=systemd", top / "systemd")):
        place = folder / places.get(controllers, "")
        if place.name == SERVICE and os.access(place / "cgroup.procs", os.W_OK):
            return place
    return None


def make(job: str, round_: int, base: Path | None) -> str:
    """Make the cgroup of a round below ``base``; returns its folder, or "" where there can be none."""
    if base is None:
        return ""
    folder = base / f"{_PREFIX}{job}-{round_}"
    try:
        folder.mkdir(exist_ok=True)
    except OSError:
        return ""
    return str(folder)


def end(cgroup: str, patience_s: float = _PATIENCE_S) -> list[int]:
    """Kill all that is in a cgroup, and remove it; returns the pids of those that live on all the same."""
    if not cgroup:
        return []
    folder = Path(cgroup)
    deadline = time.monotonic() + patience_s
    while (pids := _pids(folder)) and time.monotonic() < deadline:
        _kill(folder, pids)
        time.sleep(_LOOK_S)
    if not pids:
        for below in sorted((path for path in folder.rglob("*") if path.is_dir()), reverse=True):
            with contextlib.suppress(OSError):
                below.rmdir()
        with contextlib.suppress(OSError):
            folder.rmdir()
    return pids


def end_all(base: Path | None) -> list[int]:
    """The same for the cgroups of all rounds below ``base``."""
    found = base.glob(f"{_PREFIX}*") if base else []
    return [pid for cgroup in found for pid in end(str(cgroup))]


def _pids(folder: Path) -> list[int]:
    """Also in those that the job has made below."""
    pids = []
    for procs in folder.rglob("cgroup.procs"):
        with contextlib.suppress(OSError):  # gone meanwhile
            pids += [int(pid) for pid in procs.read_text().split()]
    return pids


def _kill(folder: Path, pids: list[int]) -> None:
    """At once, where the kernel can: those that multiply may be quicker than who kills them one by one."""
    try:
        (folder / "cgroup.kill").write_text("1")
    except OSError:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
