"""Starting and ending the processes of local nodes, and finding them again without relying on what was noted.

Every process of a node carries ``GPUCTL_NODE_DIR`` in its environment, and hands it on to its children.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import msgspec
import psutil

from gpuctl.cluster.atomic_write import write_atomic

MARK = "GPUCTL_NODE_DIR"
_FILE = "process.json"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class ProcessRecord(msgspec.Struct, frozen=True):
    """A process on this machine, in ``<dir>/process.json``: a pid alone may be somebody else's by now, so its start is
    kept with it."""

    pid: int
    boot: str
    """Linux: which boot of the machine it was started in (random(4)); else empty."""
    start: float
    """Linux: clock ticks since that boot (proc_pid_stat(5)), as a wall-clock time changes when the clock is set.
    Else: seconds since the epoch."""

    @classmethod
    def of(cls, pid: int) -> Self:
        """Raises ``psutil.Error`` and ``OSError`` if there is no such process."""
        if boot := boot_id():
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # the name may have blanks
            return cls(pid, boot, float(fields[19]))
        return cls(pid, "", psutil.Process(pid).create_time())


def boot_id() -> str:
    """Another one after each boot of this machine; empty where the system does not tell (only Linux does)."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def start(folder: Path, module: str, args: Sequence[str], env: Mapping[str, str], log: str) -> ProcessRecord:
    """Start ``python -m module args`` detached, marked as ``folder``'s, and note it there.

    Args:
        folder: where it runs, and where ``process.json`` and its log are.
        module: a Python module that this interpreter can run.
        args: its command line.
        env: all of its environment, but for the mark.
        log: name of a file in ``folder``, to which its output is appended.

    Raises ``OSError``; then nothing runs.
    """
    with (folder / log).open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *args],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=folder,
            env={**env, MARK: str(folder)},
            start_new_session=True,
        )
    try:
        noted = ProcessRecord.of(process.pid)
        write_atomic(folder / _FILE, msgspec.json.encode(noted))
    except BaseException:  # of a process that is not noted nobody would know
        process.kill()
        process.wait()
        raise
    return noted


def noted_process(folder: Path) -> psutil.Process | None:
    """The process that ``start`` noted in ``folder``, if that very one still lives."""
    if (noted := _noted(folder)) is None:
        return None
    try:
        process = psutil.Process(noted.pid)
        same = ProcessRecord.of(noted.pid) == noted
    except (OSError, psutil.Error):
        return None
    return process if same and lives(process) else None


def is_of_earlier_boot(folder: Path) -> bool:
    """Whether this machine was restarted since ``start`` noted a process in ``folder``, as far as can be known."""
    noted = _noted(folder)
    return noted is not None and noted.boot != boot_id()


def _noted(folder: Path) -> ProcessRecord | None:
    try:
        return msgspec.json.decode((folder / _FILE).read_bytes(), type=ProcessRecord)
    except (OSError, msgspec.MsgspecError):
        return None


def lives(process: psutil.Process) -> bool:
    """A zombie does not: it has ended, and whoever adopted it takes its time to notice."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def wait_until_ended(alive: Sequence[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Those that still live after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while (alive := [process for process in alive if lives(process)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return list(alive)


def marked_processes(folder: Path) -> list[psutil.Process]:
    """All living processes whose mark is ``folder`` or below it, but this one."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            mark = process.environ().get(MARK, "")
            inside = mark == str(folder) or mark.startswith(f"{folder}/")
            if inside and process.pid != os.getpid() and lives(process):
                found.append(process)
    return found


def kill_all(folder: Path, patience_s: float = 5.0) -> list[psutil.Process]:
    """SIGKILL everything marked ``folder``, children included; returns what lives on all the same."""
    deadline = time.monotonic() + patience_s
    while True:
        alive = marked_processes(folder)
        for process in alive:
            with contextlib.suppress(psutil.Error):
                for child in process.children(recursive=True):
                    child.kill()
                process.kill()
        if not alive or time.monotonic() > deadline:
            return alive
        wait_until_ended(alive, 0.2)
