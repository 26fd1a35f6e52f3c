"""What may be wrong with the machine that gpuctl runs on: folders, streams and signals. One line each, no traceback."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gpuctl.cli import app
from gpuctl.stacks.providers import processes
from tests.fakes.written_cluster import WrittenCluster
from tests.waiting import until

_FULL = Path("/dev/full")
_INTERRUPTED_WHILE_IMPORTING = """
import os, signal, sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
from gpuctl.cli.main import main
main(["status"])
"""


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    (line,) = done.stderr.splitlines()
    return line


def in_a_shell(written: WrittenCluster, line: str) -> subprocess.CompletedProcess[str]:
    gpuctl = f"{sys.executable} -m gpuctl.cli.main"
    command = ["sh", "-c", line.replace("gpuctl", gpuctl, 1)]
    return subprocess.run(command, cwd=written.work, env=written.env, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    "verb", ["status", "train ok.py", "logs", "up -c new", "exec -- pwd", "config show", "ckpt ls"]
)
def test_a_deleted_folder_is_no_place_to_work_in(written: WrittenCluster, verb: str) -> None:
    done = in_a_shell(written, f"mkdir gone && cd gone && rmdir ../gone && gpuctl {verb}")
    assert done.returncode == 2
    assert one_line(done) == "error: the working folder has been deleted; cd to an existing one"


@pytest.mark.parametrize(
    ("state", "why"),
    [
        ("{}/file", "Not a directory"),
        ("{}/file/below", "Not a directory"),
        ("/proc/nope", "No such file or directory"),
        ("/proc/nope/below", "No such file or directory"),
    ],
)
def test_a_state_folder_that_cannot_be_is_named(written: WrittenCluster, state: str, why: str) -> None:
    (written.home / "file").touch()
    written.env["GPUCTL_STATE_DIR"] = folder = state.format(written.home)
    line = f"error: cannot use the state folder {folder}: {why}; set GPUCTL_STATE_DIR to another folder"
    assert one_line(written.run("up", "-c", "new", code=1)) == line
    if "file" in folder:
        assert one_line(written.run("status", code=1)) == line


@pytest.mark.parametrize(
    ("number", "fix"),
    [(errno.EROFS, "make it writable: your clusters are noted there"), (errno.ENOSPC, "free some space")],
)
def test_a_state_folder_with_clusters_is_not_to_be_left_for_another(
    written: WrittenCluster, monkeypatch: pytest.MonkeyPatch, number: int, fix: str
) -> None:
    folder = written.env["GPUCTL_STATE_DIR"]
    monkeypatch.setenv("GPUCTL_STATE_DIR", folder)
    line = app._of_this_machine(OSError(number, "", f"{folder}/clusters/default.json"))
    assert line is not None and line.endswith(f"; {fix}")


def test_a_state_folder_is_the_same_from_everywhere(written: WrittenCluster) -> None:
    written.env["GPUCTL_STATE_DIR"] = "state"
    assert one_line(written.run("status", code=2)) == (
        "error: GPUCTL_STATE_DIR=state is a relative path; use an absolute one"
    )


@pytest.mark.skipif(not _FULL.exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("verb", ["status", "jobs -o json", "logs", "--help", "config show"])
def test_output_that_finds_no_room_is_a_failure_in_one_line(written: WrittenCluster, verb: str) -> None:
    written.log(written.submit().job, 1, "node-0", "hello")
    done = in_a_shell(written, f"gpuctl {verb} > /dev/full")
    assert done.returncode == 1
    assert one_line(done) == "error: cannot write: No space left on device; make room where the output goes"


@pytest.mark.parametrize("streams", [">&-", "2>&-", "<&- >&- 2>&-", *(["2>/dev/full"] if _FULL.exists() else [])])
def test_a_job_is_started_whatever_becomes_of_what_is_said(written: WrittenCluster, streams: str) -> None:
    (written.work / "ok.py").touch()
    done = in_a_shell(written, f"gpuctl train -d ok.py {streams}")
    assert (done.returncode, done.stderr.count("Traceback")) == (0, 0)
    assert written.store.list("jobs") != []


@pytest.mark.parametrize(
    "module", ["gpuctl.cli.app", "typer", "gpuctl.cli.verbs", "gpuctl.cli.commands.machines.status", "obstore"]
)
def test_ctrl_c_while_modules_load_is_one_line(written: WrittenCluster, module: str) -> None:
    command = [sys.executable, "-c", _INTERRUPTED_WHILE_IMPORTING, module]
    done = subprocess.run(command, cwd=written.work, env=written.env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_up_that_is_broken_off_says_what_runs(tmp_path: Path, number: signal.Signals, code: int) -> None:
    """Once an agent has started; the nodes' folder is made a bucket that nobody answers from would not do: a file that
    takes the place of the heartbeats' folder keeps them from being live."""
    state, bucket = tmp_path / "state", tmp_path / "bucket"
    env = {**os.environ, "GPUCTL_STATE_DIR": str(state), "NO_COLOR": "1"}
    command = [sys.executable, "-m", "gpuctl.cli.main", "up", "-c", "new", "--nodes", "2", "--bucket", bucket.as_uri()]
    up = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        until(lambda: processes.marked_processes(state), "an agent")
        up.send_signal(number)
        out, said = up.communicate(timeout=60)
        assert (up.returncode, out) == (code, "")
        assert said == (
            "interrupted; nodes of cluster new that were started keep running\n"
            "  continue: gpuctl up --cluster new\n"
            "  stop:     gpuctl down --cluster new\n"
        )
    finally:
        processes.kill_all(state)
