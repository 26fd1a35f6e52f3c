"""Local nodes' processes: started, noted, found again, ended."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest
from msgspec.structs import replace

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
        for another in (replace(old, pid=os.getpid()), replace(old, boot="another boot")):
            (folder / "process.json").write_bytes(msgspec.json.encode(another))
            assert processes.noted_process(folder) is None
    finally:
        assert processes.kill_all(folder) == []


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts from the boot")
def test_a_process_is_the_same_one_after_the_clock_was_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The boot's time then differs, and with it the time of day at which each process was started."""
    folder = _start(tmp_path)
    try:
        noted = processes.noted_process(folder)
        assert noted is not None
        started_at = noted.create_time()
        later = tmp_path / "proc"
        later.mkdir()
        (later / str(noted.pid)).symlink_to(f"/proc/{noted.pid}")
        stat = Path("/proc/stat").read_text()
        booted = re.search(r"^btime (\d+)$", stat, re.MULTILINE)
        assert booted is not None
        (later / "stat").write_text(stat.replace(booted[0], f"btime {int(booted[1]) + 1}"))
        monkeypatch.setattr(psutil, "PROCFS_PATH", str(later))
        assert psutil.Process(noted.pid).create_time() > started_at + 0.5, "else the test is about nothing"
        again = processes.noted_process(folder)
        assert again is not None and again.pid == noted.pid
    finally:
        monkeypatch.undo()
        assert processes.kill_all(folder) == []


def test_a_process_that_cannot_be_noted_does_not_run(tmp_path: Path) -> None:
    (tmp_path / "node-0" / "process.json").mkdir(parents=True)
    (tmp_path / "a_sleeper.py").write_text("import time; time.sleep(600)")
    with pytest.raises(IsADirectoryError):
        processes.start(tmp_path / "node-0", "a_sleeper", [], _module(tmp_path, SLEEPER), "log")
    assert not [child for child in psutil.Process().children() if str(tmp_path) in str(child.environ())]


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
