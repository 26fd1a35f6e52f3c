"""How far a job is, at the bottom of a terminal: a real one (tmux), of which the tests read what it shows."""

from __future__ import annotations

import doctest
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpuctl.cli.render.job import progress_line
from gpuctl.cluster.records.rounds import JobOutcome
from tests.fakes.written_cluster import WrittenCluster, progress
from tests.waiting import until

SUCCEEDED = JobOutcome(result="succeeded", exit_code=0)
WHOLE = "round 1 · 2 nodes · step 120 of 2000 · loss 0.25 · 10 steps/s · checkpoint 100"


class Screen:
    """A terminal in which ``gpuctl`` runs, and then ``end CODE`` is printed."""

    def __init__(self, cluster: WrittenCluster, folder: Path, columns: int, *args: str) -> None:
        self._tmux = ("tmux", "-S", str(folder / "tmux"))
        unset = ["env", *(f"--unset={name}" for name in ("COLUMNS", "LINES", "TMUX", "NO_COLOR"))]
        command = shlex.join([sys.executable, "-m", "gpuctl.cli.main", *args])
        size = ("-x", str(columns), "-y", "12")
        line = f"trap : INT; {command}; echo end $?; exec sleep 600"
        subprocess.run(
            [*unset, *self._tmux, "-f", "/dev/null", "new-session", "-d", *size, "bash", "-c", line],
            env=cluster.env,
            cwd=cluster.work,
            check=True,
        )

    def lines(self) -> list[str]:
        shown = subprocess.run([*self._tmux, "capture-pane", "-p"], capture_output=True, text=True, check=True).stdout
        return [line.rstrip() for line in shown.rstrip("\n").split("\n")]

    def wait_for(self, *lines: str) -> None:
        """Its last lines are these."""
        until(lambda: self.lines()[-len(lines) :] == [*lines], f"{lines} in {self.lines()}")

    def interrupt(self) -> None:
        subprocess.run([*self._tmux, "send-keys", "C-c"], check=True)

    def end(self) -> None:
        subprocess.run([*self._tmux, "kill-server"], check=False)


@pytest.fixture
def job(written: WrittenCluster) -> str:
    """Of two nodes, which has begun, has made 120 of 2000 steps and saved the hundredth."""
    job = written.submit().job
    written.round(job, 1, ("node-0", "node-1"))
    written.beat("node-0", progress=replace(progress(job, 120, loss=0.25), steps=2000))
    written.checkpoint(job, 100, {"w": b"1234"})
    return job


@pytest.fixture
def screens() -> Iterator[list[Screen]]:
    if not shutil.which("tmux"):
        pytest.skip("no tmux here: apt-get install tmux")
    opened: list[Screen] = []
    try:
        yield opened
    finally:
        for screen in opened:
            screen.end()


def test_a_line_is_cut_between_its_parts() -> None:
    assert doctest.testmod(progress_line) == (0, 1)


def test_the_last_line_of_a_terminal_is_how_far_the_job_is_and_what_it_prints_goes_above(
    written: WrittenCluster, job: str, screens: list[Screen], tmp_path: Path
) -> None:
    screens.append(screen := Screen(written, tmp_path, 100, "logs", "-f", job))
    screen.wait_for("· round 1: job starts, 2 nodes", WHOLE)
    written.log(job, 1, "node-0", "hello", "again")
    screen.wait_for("node-0/0 | hello", "node-0/0 | again", WHOLE)
    written.beat("node-0", progress=progress(job, 130))
    screen.wait_for("node-0/0 | again", "round 1 · 2 nodes · step 130 · 10 steps/s · checkpoint 100")
    written.round(job, 2, ("node-1",), reason="node-0 lost")
    screen.wait_for("node-0/0 | again", "· round 2: node-0 lost, 1 node", "round 2 · 1 node · checkpoint 100")
    written.end(job, 2, SUCCEEDED)
    screen.wait_for("· round 2: node-0 lost, 1 node", f"job {job} succeeded", "end 0")


def test_ctrl_c_leaves_a_clean_terminal(
    written: WrittenCluster, job: str, screens: list[Screen], tmp_path: Path
) -> None:
    screens.append(screen := Screen(written, tmp_path, 100, "logs", "-f", job))
    screen.wait_for("· round 1: job starts, 2 nodes", WHOLE)
    screen.interrupt()
    screen.wait_for("· round 1: job starts, 2 nodes", "", "interrupted", "end 130")


def test_a_narrow_terminal_shows_what_fits_in_one_line(
    written: WrittenCluster, job: str, screens: list[Screen], tmp_path: Path
) -> None:
    screens.append(screen := Screen(written, tmp_path, 50, "logs", "-f", job))
    screen.wait_for("· round 1: job starts, 2 nodes", "round 1 · 2 nodes · step 120 of 2000 · loss 0.25")
    written.log(job, 1, "node-0", "hello")
    screen.wait_for("node-0/0 | hello", "round 1 · 2 nodes · step 120 of 2000 · loss 0.25")


def test_nothing_of_it_is_in_what_is_piped(written: WrittenCluster, job: str) -> None:
    written.env["TERM"] = "xterm"
    following = written.start("logs", "-f", job)
    assert following.stdout and following.stderr
    for line in ("hello", "again"):  # between two lines it looks at how far the job is
        written.log(job, 1, "node-0", line)
        assert following.stdout.readline() == f"node-0/0 | {line}\n"
    written.end(job, 1, SUCCEEDED)
    shown, said = following.communicate()
    assert shown == ""
    assert "\033" not in said and "step" not in said
