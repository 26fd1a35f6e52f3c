"""The command of a round: real processes, really killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from msgspec.structs import replace

from gpuctl.bootstrap.rendezvous.command import CommandRun
from gpuctl.cluster.clock import SystemClock
from gpuctl.cluster.records.rounds import Member, NodeExit, Round
from tests.waiting import PATIENCE_S, until

ROUND = Round(
    job="exp1",
    number=2,
    phase="run",
    epoch=1,
    members=(
        Member(node="n0", incarnation="a", address="127.0.0.1", nproc=1),
        Member(node="n1", incarnation="b", address="127.0.0.1", nproc=1),
    ),
)
HURRY = replace(ROUND, phase="drain", drain_s=0.0)
PATIENT = replace(ROUND, phase="drain", drain_s=PATIENCE_S)


class Shell:
    """A shell script in a round, as node n1, with a folder to write to."""

    def __init__(self, script: str, folder: Path) -> None:
        self.folder = folder
        self.ended = threading.Event()
        self.run = CommandRun(["bash", "-c", script], ROUND, 1, SystemClock(), self.ended.set)
        self.run.start({"FOLDER": str(folder), "RANK": "1"})

    def exit(self) -> NodeExit:
        assert self.ended.wait(PATIENCE_S)
        assert self.run.exit is not None
        return self.run.exit

    def wait_for(self, file: str) -> None:
        until((self.folder / file).exists, file)


@pytest.mark.parametrize(
    ("script", "status", "code", "name"),
    [
        ("exit 0", "completed", 0, ""),
        ("exit 3", "failed", 3, ""),
        ("kill -SEGV $$", "failed", 139, "SIGSEGV"),
        ("kill -KILL $$", "failed", 137, "SIGKILL"),
        ("no-such-program", "failed", 127, ""),
    ],
)
def test_how_a_command_ended_is_told(tmp_path: Path, script: str, status: str, code: int, name: str) -> None:
    shell = Shell(script, tmp_path)
    found = shell.exit()
    assert (found.status, shell.run.exit_code) == (status, code)
    assert (found.job, found.round, found.node, found.incarnation) == ("exp1", 2, "n1", "b")
    assert [(r.rank, r.exit_code, r.signal) for r in found.ranks] == (
        [] if status == "completed" else [(1, code, name)]
    )


def test_a_command_finds_the_variables_and_nothing_to_read(tmp_path: Path) -> None:
    shell = Shell('cat > "$FOLDER/read"; echo "$RANK $HOME" > "$FOLDER/said"', tmp_path)
    assert shell.exit().status == "completed"
    assert (tmp_path / "read").read_text() == ""
    assert (tmp_path / "said").read_text().split() == ["1", os.environ["HOME"]]


@pytest.mark.parametrize(("code", "status"), [(0, "drained"), (143, "drained"), (7, "stopped")])
def test_asked_to_stop_it_may_take_its_time_and_has_not_failed(tmp_path: Path, code: int, status: str) -> None:
    script = f'trap \'touch "$FOLDER/asked"; exit {code}\' TERM; touch "$FOLDER/up"; while :; do sleep 0.05; done'
    shell = Shell(script, tmp_path)
    shell.wait_for("up")
    shell.run.ask_to_stop(PATIENT)
    found = shell.exit()
    assert (found.status, found.ranks, shell.run.exit_code) == (status, (), None)
    assert (tmp_path / "asked").exists()


def test_what_ignores_sigterm_is_killed_at_the_deadline(tmp_path: Path) -> None:
    shell = Shell('trap "" TERM; touch "$FOLDER/up"; while :; do sleep 0.05; done', tmp_path)
    shell.wait_for("up")
    shell.run.ask_to_stop(HURRY)
    time.sleep(0.01)  # past the deadline
    shell.run.ask_to_stop(HURRY)
    assert shell.exit().status == "stopped"


def test_nothing_that_it_has_started_outlives_it(tmp_path: Path) -> None:
    """Neither in its session nor out of it, neither killed nor ended well."""
    for number, (end, status) in enumerate([("exit 0", "completed"), ("sleep 1000", "stopped")]):
        folder = tmp_path / str(number)
        folder.mkdir()
        shell = Shell(START + end, folder)
        shell.wait_for("up")
        if status == "stopped":
            shell.run.kill()
        assert shell.exit().status == status
        left = [int((folder / name).read_text()) for name in ("near", "far")]
        assert [pid for pid in left if psutil.pid_exists(pid)] == []


def test_a_signal_reaches_the_command_and_what_it_runs(tmp_path: Path) -> None:
    script = 'trap \'touch "$FOLDER/outer"\' USR1; bash -c \'trap "touch $FOLDER/inner; exit" USR1; touch $FOLDER/up; '
    script += "while :; do sleep 0.05; done'; exit 0"
    shell = Shell(script, tmp_path)
    shell.wait_for("up")
    shell.run.send(signal.SIGUSR1)
    assert shell.exit().status == "completed"
    assert (tmp_path / "outer").exists()
    assert (tmp_path / "inner").exists()


STARTER = f"""
import sys
sys.path[:0] = {sys.path!r}
from pathlib import Path
from tests.bootstrap.rendezvous.test_command import Shell
folder = Path(sys.argv[1])
Shell(sys.argv[2], folder)
input()
"""
START = """
sleep 1000 & echo $! > "$FOLDER/near"
setsid sh -c 'echo $$ > "$FOLDER/far.new"; mv "$FOLDER/far.new" "$FOLDER/far"; exec sleep 1000' &
until [ -e "$FOLDER/far" ]; do sleep 0.01; done
touch "$FOLDER/up"
"""


def test_it_does_not_outlive_whoever_started_it(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STARTER, str(tmp_path), START + "wait"], stdin=subprocess.PIPE
    ) as starter:
        until((tmp_path / "up").exists, "the command")
        starter.kill()
    left = [int((tmp_path / name).read_text()) for name in ("near", "far")]
    until(lambda: not any(psutil.pid_exists(pid) for pid in left), "all of it to be gone")


def test_it_stands_still_while_whoever_started_it_does(tmp_path: Path) -> None:
    """The others go on without a node that is silent: two of one rank would write the same checkpoint."""
    counting = 'n=0; while :; do n=$((n + 1)); echo $n > "$FOLDER/new"; mv "$FOLDER/new" "$FOLDER/n"; sleep 0.02; done'
    with subprocess.Popen([sys.executable, "-c", STARTER, str(tmp_path), counting], stdin=subprocess.PIPE) as starter:
        until((tmp_path / "n").exists, "the command")

        def stands_still() -> bool:
            before = (tmp_path / "n").read_text()
            time.sleep(0.5)  # in which it would count on
            return (tmp_path / "n").read_text() == before

        assert not stands_still()
        starter.send_signal(signal.SIGSTOP)
        until(stands_still, "it to stand still")
        starter.send_signal(signal.SIGCONT)
        until(lambda: not stands_still(), "it to go on")
        starter.kill()


def test_a_closed_standard_error_is_no_failure() -> None:
    line = f"{sys.executable} -P -m gpuctl.bootstrap.rendezvous.keeper sh -c 'exit 4' 2>&-"
    with subprocess.Popen(["bash", "-c", line], stdin=subprocess.PIPE) as keeper:
        assert keeper.wait(PATIENCE_S) == 4


def test_a_script_that_does_not_say_what_runs_it_is_run_by_a_shell(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text('echo "$1" > "$FOLDER/said"; exit 3\n')
    script.chmod(0o755)
    ended = threading.Event()
    run = CommandRun([str(script), "a b"], ROUND, 1, SystemClock(), ended.set)
    run.start({"FOLDER": str(tmp_path)})
    assert ended.wait(PATIENCE_S)
    assert (run.exit_code, (tmp_path / "said").read_text()) == (3, "a b\n")
