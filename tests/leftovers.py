"""What a run of the tests that was killed has left behind: processes, mounts, containers.

Every run has a name, which all that it starts inherits as an environment variable, and its base folder holds. A name
ends with the process it names, so whatever carries the name of one that is gone is nobody's, and is removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path

import psutil

from gpuctl.bootstrap.containers.command_lines import FOLDER_LABEL

RUN = "GPUCTL_TEST_RUN"
"""Variable: the name of the run, ``pid:start`` of the process that is the whole of it."""
_NAME = "run-of-the-tests"
"""File in a run's base folder, with its name."""
_PATIENCE_S = 30.0


def name_this_run() -> str:
    """The name of the run that this process is of, or begins."""
    process = psutil.Process()
    return os.environ.setdefault(RUN, f"{process.pid}:{process.create_time():.2f}")


def sign(folder: Path) -> None:
    """Say whose base folder this is, or a worker's part of one."""
    base = folder.parent if folder.name.startswith("popen-") else folder
    (base / _NAME).write_text(name_this_run())


def sweep(bases: Path | None = None) -> list[str]:
    """Remove what is left of runs that are gone; returns what it was, in words.

    ``bases`` is the folder of pytest's base folders.
    """
    swept = [f"process {p.pid}" for p in _end_processes()]
    abandoned = _abandoned(bases or Path(tempfile.gettempdir()) / f"pytest-of-{getpass.getuser()}")
    swept += [mount for base in abandoned for mount in _unmount_below(base)]
    return swept + _remove_containers_below(abandoned)


@contextlib.contextmanager
def alone(lock: Path) -> Iterator[None]:
    """Two runs at once would judge each other's speed: the second waits here for the first."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("waits for another run of the tests on this machine to end", file=sys.stderr, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _is_gone(name: str) -> bool:
    pid, _, start = name.partition(":")
    try:
        return abs(psutil.Process(int(pid)).create_time() - float(start)) > 1
    except psutil.NoSuchProcess:
        return True
    except ValueError:
        return False


def _end_processes() -> list[psutil.Process]:
    """Until there are none: some of them may be starting others."""
    ended: dict[int, psutil.Process] = {}
    while found := [process for process in psutil.process_iter() if _is_gone(_run_of(process))]:
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.kill()
            ended[process.pid] = process
        if psutil.wait_procs(found, timeout=_PATIENCE_S)[1]:
            break
    return list(ended.values())


def _run_of(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error, OSError):
        if process.status() != psutil.STATUS_ZOMBIE:
            return process.environ().get(RUN, "")
    return ""


def _abandoned(bases: Path) -> list[Path]:
    found = []
    for name in bases.glob(f"*/{_NAME}"):
        with contextlib.suppress(OSError):
            if _is_gone(name.read_text()):
                found.append(name.parent.resolve())
    return found


def _unmount_below(base: Path) -> list[str]:
    try:
        mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    except OSError:
        return []
    below = [path for path in reversed(mounts) if path.startswith(f"{base}/")]  # the deepest are the last
    for path in below:
        subprocess.run(["umount", "--lazy", path], capture_output=True, check=False)
    return [f"mount {path}" for path in below]


def _remove_containers_below(bases: Collection[Path]) -> list[str]:
    """Those of jobs: the agent names a container's folder in a label."""
    podman = shutil.which("podman")
    if podman is None or not bases:
        return []
    listed = [podman, "ps", "--all", "--format", f'{{{{.ID}}}} {{{{index .Labels "{FOLDER_LABEL}"}}}}']
    done = subprocess.run(listed, capture_output=True, text=True, check=False)
    pairs = [line.partition(" ") for line in done.stdout.splitlines()]
    ids = [one for one, _, folder in pairs if any(Path(folder).is_relative_to(base) for base in bases)]
    if ids:
        subprocess.run([podman, "rm", "--force", "--time", "0", *ids], capture_output=True, check=False)
    return [f"container {one}" for one in ids]
