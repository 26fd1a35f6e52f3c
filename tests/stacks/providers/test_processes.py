"""Local nodes' processes: started, noted, found again, ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil

from gpuctl.stacks.providers import processes

SLEEPER = """import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
"""


def _module(folder: Path, text: str) -> dict[str, str]:
    (folder / "a_sleeper.py").write_text(text)
    return {**os.environ, "PYTHONPATH": str(folder)}


def _start(tmp_path: Path, text: str = SLEEPER + "time.sleep(600)\n") -> Path:
    folder = tmp_path / "node-0"
    folder.mkdir()
    processes.start(folder, "a_sleeper", [], _module(tmp_path, text), "log")
    return folder


def _until(count: int, folder: Path) -> list[psutil.Process]:
    deadline = time.monotonic() + 10
    while len(found := processes.marked_processes(folder)) != count:
        assert time.monotonic() < deadline, found
        time.sleep(0.01)
    return found


def test_what_was_started_is_known_by_pid_and_start_time(tmp_path: Path) -> None:
    folder = _start(tmp_path)
    try:
        noted = processes.noted_process(folder)
        assert noted is not None and noted.pid == _until(2, folder)[0].pid
        old = msgspec.json.decode((folder / "process.json").read_bytes(), type=processes.ProcessRecord)
        another = processes.ProcessRecord(os.getpid(), old.started_at)
        (folder / "process.json").write_bytes(msgspec.json.encode(another))
        assert processes.noted_process(folder) is None
    finally:
        assert processes.kill_all(folder) == []


def test_a_process_that_ended_or_was_never_noted_is_none(tmp_path: Path) -> None:
    folder = _start(tmp_path, "")
    deadline = time.monotonic() + 10
    # Its mark goes with its memory, a moment before the kernel calls it ended: wait for the end itself.
    while processes.noted_process(folder) is not None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert processes.noted_process(tmp_path) is None
    (folder / "process.json").write_text("no json")
    assert processes.noted_process(folder) is None


def test_children_carry_the_mark_and_end_with_the_node(tmp_path: Path) -> None:
    folder = _start(tmp_path)
    both = _until(2, folder)
    assert processes.kill_all(folder) == []
    assert processes.wait_until_ended(both, 5) == []


def test_a_child_orphaned_by_its_parents_death_is_still_found(tmp_path: Path) -> None:
    folder = _start(tmp_path)
    _until(2, folder)
    noted = processes.noted_process(folder)
    assert noted is not None
    os.kill(noted.pid, signal.SIGKILL)
    orphan = _until(1, folder)[0]
    assert processes.kill_all(folder) == []
    assert processes.wait_until_ended([orphan], 5) == []


def test_a_folder_with_a_longer_name_is_another_one(tmp_path: Path) -> None:
    _start(tmp_path)
    try:
        assert processes.marked_processes(tmp_path / "node") == []
        _until(2, tmp_path)  # a process shows its environment a moment after it has begun
        other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        try:
            assert other.pid not in {process.pid for process in processes.marked_processes(tmp_path)}
        finally:
            other.kill()
            other.wait()
    finally:
        assert processes.kill_all(tmp_path) == []
