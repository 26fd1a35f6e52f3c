"""The idle watch: a machine on which nothing happens for long enough takes itself away.

Armed before anything else is done on the machine, and on its own: it asks no bucket, no agent and no network. So a
cluster ends whose ``up`` was broken off, whose job never came, or whose user's laptop died. It also has
a machine replaced whose GPU is ill, by the agent's word.

Nothing here looks at the time of day. What counts is time on the monotonic clock between two looks, and of a longer
gap (the machine slept, or was held up) no more than one usual one.
"""

from __future__ import annotations

import re
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from .leave import claim, leave
from .metadata import Metadata

EVERY_S = 15.0
BOOT_S = 3600.0
"""A boot that is not over then hangs, whatever load it makes."""
CLAIM_S = 900.0
"""A claim after which the machine is still here has come to nothing."""
BUSY_CORES = 0.5
BUSY_GPU = 5.0
"""Per cent of one GPU."""
_LOGIN = re.compile(rb"sshd(-session)?: [^ /[]+(@|\0*$)|(/\S*)?ssm-session-worker\0")
"""``user@pts/0``, ``user@notty``, or ``user`` alone: logged in without a session, to forward ports. ``user [priv]`` may
stand beside it, and is the same login. Sessions of AWS's Session Manager have a process each."""
_TICKS = 100.0
"""Of /proc's clock in a second (``USER_HZ``, the same on all that clouds have)."""


class IdleCheck:
    """Finds out whether, and with what, the machine is busy. Call ``look`` every ``EVERY_S`` seconds."""

    def __init__(self, root: Path, idle_s: float, gpu_load: Callable[[], float] | None = None) -> None:
        self.idle_s = 0.0
        """For how long the machine has been idle."""
        self.ill_s = 0.0
        """For how long it has been ill, and nobody logged in to look."""
        self.every_s = min(EVERY_S, idle_s / 4 or EVERY_S)
        self._root = root
        self._limit_s = idle_s
        self._gpu_load = gpu_load or gpu_use
        self._looked_at: float | None = None
        self._boot_s = 0.0
        self._claim_s = 0.0
        self._touched = 0
        self._cpu_s = 0.0

    def look(self, now: float) -> str:
        """Why the machine is busy; empty: it is not. ``now``: monotonic seconds."""
        gap = 0.0 if self._looked_at is None else now - self._looked_at
        first, self._looked_at = self._looked_at is None, now
        counted = min(gap, 2 * self.every_s)
        visited, ill = sessions(self._root) > 0, self.illness() != ""
        why = self._why(first, gap, counted, visited) or ("ill" if ill else "")
        self.idle_s = 0.0 if why else self.idle_s + counted
        self.ill_s = self.ill_s + counted if ill and not visited else 0.0
        return why

    def is_over(self) -> bool:
        return 0 < self._limit_s <= self.idle_s

    def illness(self) -> str:
        """What the agent says is wrong with a GPU, once no work is left on it; empty: nothing."""
        try:
            return (self._root / "run/gpuctl/ill").read_text()
        except OSError:
            return ""

    def claim_is_stale(self) -> bool:
        """Somebody wanted to take the machine away long ago, and did not."""
        return self._claim_s >= CLAIM_S

    def _why(self, first: bool, gap: float, counted: float, visited: bool) -> str:
        booted = (self._root / "var/lib/gpuctl/boot/agent.done").exists()
        claimed = (self._root / "run/gpuctl/leaving").exists()
        self._boot_s = 0.0 if booted else self._boot_s + counted
        self._claim_s = self._claim_s + counted if claimed else 0.0
        cpu_s, touched = cpu_seconds(self._root), _touched(self._root / "run/gpuctl/busy")
        cores = (cpu_s - self._cpu_s) / gap if gap else 0.0
        worked, self._touched = touched != self._touched, touched
        self._cpu_s = cpu_s
        if first:
            return "just started"
        if visited:
            return "somebody is logged in"
        if not booted:
            return "" if self._boot_s >= BOOT_S else "booting"
        if worked:
            return "a job is running or waiting"
        if cores >= BUSY_CORES:
            return f"CPUs in use: {cores:.1f} cores"
        load = self._gpu_load()
        return f"GPU in use: {load:g} %" if load >= BUSY_GPU else ""


def watch(
    root: Path,
    spec: Mapping[str, Any],
    metadata: Metadata,
    *,
    monotonic: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    take_away: Callable[..., object] = leave,
    gpu_load: Callable[[], float] | None = None,
) -> None:
    """Does not return, but on a machine of ``ssh``, where there is nothing to watch. With 0 minutes, none is idle."""
    minutes, hold_s = spec["idle_minutes"], 60 * spec["hold_ill_minutes"]
    if spec["provider"] == "ssh":
        return
    _prepare(root, metadata)
    idle, said = IdleCheck(root, 60 * minutes, gpu_load), ""
    while True:
        why = idle.look(monotonic())
        if why.partition(":")[0] != said:
            said = why.partition(":")[0]
            print(f"busy: {why}" if why else f"idle: leaving in {minutes:g} minutes" if minutes else "idle", flush=True)
        ill = idle.illness() if idle.ill_s > hold_s else ""
        reason = f"ill: {ill}" if ill else f"idle for {minutes:g} minutes"
        if (ill or idle.is_over()) and (claim(root, reason) or idle.claim_is_stale()):
            # Where no job has ever been, nobody misses it; and whatever makes all machines seem ill ends there.
            take_away(spec, metadata, reason, replace=bool(ill) and _touched(root / "run/gpuctl/busy") > 0)
            idle = IdleCheck(root, 60 * minutes, gpu_load)
        sleep(idle.every_s)


def sessions(root: Path) -> int:
    """Logins through sshd or AWS, with a terminal or without, by what their processes call themselves. Somebody who
    only knocks is none; nor is ``who`` asked, which knows of terminals alone."""
    found = 0
    for path in (root / "proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found += bool(_LOGIN.match(path.read_bytes()))
    return found


def cpu_seconds(root: Path) -> float:
    """Used by all processes there are, and by the children they had: in a container, those of the container."""
    ticks = 0
    for path in (root / "proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError):
            ticks += sum(int(field) for field in path.read_text().rpartition(")")[2].split()[11:15])
    return ticks / _TICKS


class GpuUse:
    """Utilization in per cent of the busiest GPU. One that does not answer keeps no machine.

    A question that hangs in the driver cannot be killed, nor waited for: while there is one, no other is asked.
    """

    def __init__(self, timeout_s: float = 30.0) -> None:
        self._timeout_s = timeout_s
        self._hangs: subprocess.Popen[str] | None = None

    def __call__(self) -> float:
        if self._hangs and self._hangs.poll() is None:
            return 0.0
        command = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
        try:
            asked = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        except OSError:
            return 0.0
        try:
            told, _ = asked.communicate(timeout=self._timeout_s)
        except subprocess.TimeoutExpired:
            asked.kill()
            self._hangs = asked
            return 0.0
        return max((float(word) for word in told.split() if word.isdigit()), default=0.0)


gpu_use = GpuUse()
"""One for all who look."""


def _touched(path: Path) -> int:
    """A mark that changes; never compared with a clock."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _prepare(root: Path, metadata: Metadata) -> None:
    """A laptop that died must not look like a login for hours: ask connections that are silent. And Azure turns notices
    on for a machine when it first asks, and takes two minutes for it."""
    for name, value in (("time", 120), ("intvl", 30), ("probes", 4)):
        with suppress(OSError):
            (root / f"proc/sys/net/ipv4/tcp_keepalive_{name}").write_text(str(value))
    if metadata.provider == "azure":
        threading.Thread(target=_warm_up, args=(metadata,), daemon=True).start()


def _warm_up(metadata: Metadata) -> None:
    with suppress(OSError):
        metadata.get("/metadata/scheduledevents?api-version=2020-07-01", 150)
