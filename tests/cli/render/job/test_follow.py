"""``train`` and ``logs``: the tests write what rank 0 and the agents would."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterable

import msgspec
import pytest

from gpuctl.cluster import layout
from gpuctl.cluster.jobs import queue
from gpuctl.cluster.jobs.code_archive import unpack
from gpuctl.cluster.records.codec import decode
from gpuctl.cluster.records.jobs import JobSpec
from gpuctl.cluster.records.rounds import JobOutcome
from gpuctl.cluster.storage.streams import ChunkWriter
from tests.fakes.written_cluster import WrittenCluster
from tests.marks import slow_but_on_a_folder
from tests.waiting import until

SUCCEEDED = JobOutcome(result="succeeded", exit_code=0)


def lines_of(stream: Iterable[str]) -> tuple[list[str], threading.Thread]:
    """The lines of a pipe as they come."""
    lines: list[str] = []

    def read() -> None:
        lines.extend(line.rstrip("\n") for line in stream)  # one by one, as they come

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return lines, thread


class Following:
    """A ``gpuctl`` that runs, and what it has printed so far."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        self.process = process
        self.out, self._reading_out = lines_of(process.stdout)
        self.err, self._reading_err = lines_of(process.stderr)

    def wait_for(self, condition: Callable[[], object], what: str) -> None:
        until(lambda: condition() or self.process.poll() is not None, what)
        assert condition(), f"{what} never came\n{self.out}\n{self.err}"

    def end(self) -> int:
        code = self.process.wait(timeout=30)
        self._reading_out.join(timeout=30)
        self._reading_err.join(timeout=30)
        return code


def start(cluster: WrittenCluster, *args: str) -> tuple[Following, JobSpec]:
    following = Following(cluster.start(*args))
    following.wait_for(lambda: queue.newest(cluster.store), "the job in line")
    return following, queue.find(cluster.store, None)


@pytest.fixture
def script(written_anywhere: WrittenCluster) -> WrittenCluster:
    (written_anywhere.work / "digits.py").write_text("print('training')\n")
    return written_anywhere


def test_train_sends_the_folder_and_puts_the_job_in_line(script: WrittenCluster) -> None:
    (script.work / "gpuctl.yaml").write_text("env:\n  A: file\nmax_restarts: 2\n")
    (script.work / ".gitignore").write_text("data\n")
    (script.work / "data").write_text("large")
    done = script.run("train", "digits.py", "-d", "--nodes", "1:2", "--nproc", "2", "-e", "B=x y", "--", "--lr", "0.1")
    assert done.stdout == "digits-1\n"
    assert "watch it with: gpuctl logs -f digits-1" in done.stderr
    spec = queue.find(script.store, "digits-1")
    assert (spec.script, spec.args, spec.env) == ("digits.py", ("--lr", "0.1"), {"A": "file", "B": "x y"})
    assert (spec.nodes_min, spec.nodes_max, spec.nproc, spec.max_restarts) == (1, 2, 2, 2)
    code = script.store.get(layout.code(spec.code))
    assert code is not None
    unpack(code, script.home / "out", spec.code)
    assert sorted(p.name for p in (script.home / "out").iterdir()) == [".gitignore", "digits.py", "gpuctl.yaml"]
    again = script.run("train", "digits.py", "-d")
    assert "already there" in again.stderr
    assert queue.find(script.store, "digits-2").code == spec.code


def test_train_shows_rounds_and_lines_as_they_come_and_succeeds_with_the_job(script: WrittenCluster) -> None:
    following, spec = start(script, "train", "digits.py")
    script.round(spec.job, 1, ("node-0", "node-1"))
    script.log(spec.job, 1, "node-0", "step 1", rank=0, at=2.0)
    script.log(spec.job, 1, "node-1", "step 1", rank=1, at=1.0)
    following.wait_for(lambda: len(following.out) == 2, "the first lines")
    script.round(spec.job, 2, ("node-1",), reason="node-0 lost")
    script.log(spec.job, 2, "node-1", "step 2", rank=0)
    script.end(spec.job, 2, SUCCEEDED)
    assert following.end() == 0
    assert sorted(following.out[:2]) == ["node-0/0 | step 1", "node-1/1 | step 1"]
    assert following.out[2:] == ["node-1/0 | step 2"]
    told = [line for line in following.err if line.startswith(("·", "job"))]
    assert told == [
        f"job {spec.job} is queued (Ctrl-C detaches; the job goes on)",
        "· round 1: job starts, 2 nodes",
        "· round 2: node-0 lost, 1 node",
        f"job {spec.job} succeeded",
    ]


def test_a_failed_job_gives_its_exit_code_and_the_first_traceback(script: WrittenCluster) -> None:
    following, spec = start(script, "train", "digits.py")
    script.round(spec.job, 1, ("node-0", "node-1"))
    script.log(spec.job, 1, "node-1", "last words", rank=2)
    trace = 'Traceback (most recent call last):\n  File "digits.py", line 1\nZeroDivisionError: division by zero'
    what = "rank 2 on node-1 exited with code 3"
    script.end(spec.job, 1, JobOutcome(result="failed", exit_code=3, message=what, traceback=trace))
    assert following.end() == 3
    assert following.out == ["node-1/2 | last words"]
    assert following.err[-4:-1] == trace.splitlines()
    assert following.err[-1] == f"error: job {spec.job} failed: {what}; see its output: gpuctl logs {spec.job}"


@pytest.mark.slow
def test_ctrl_c_leaves_the_job_running_and_says_how_to_come_back(script: WrittenCluster) -> None:
    following, spec = start(script, "train", "digits.py")
    following.wait_for(lambda: any("is queued" in line for line in following.err), "that it is in line")
    os.kill(following.process.pid, signal.SIGINT)
    assert following.end() == 130
    assert following.err[-3:] == [
        f"detached; {spec.job} goes on",
        f"  reattach: gpuctl logs -f {spec.job}",
        f"  cancel:   gpuctl cancel {spec.job}",
    ]
    assert script.store.get(layout.cancel(spec.job)) is None
    assert queue.outcome(script.store, spec.job) is None
    script.round(spec.job, 1, ("node-0",))
    script.log(spec.job, 1, "node-0", "still here")
    back = Following(script.start("logs", "-f"))
    back.wait_for(lambda: back.out, "its output")
    script.end(spec.job, 1, SUCCEEDED)
    assert back.end() == 0
    assert back.out == ["node-0/0 | still here"]


@pytest.mark.slow
@slow_but_on_a_folder
def test_a_job_in_line_tells_what_it_waits_for(script: WrittenCluster) -> None:
    ahead = script.submit("other.py").job
    following = Following(script.start("train", "digits.py"))
    following.wait_for(lambda: any("waits" in line for line in following.err), "what it waits for")
    assert f"· digits-2 waits behind {ahead}" in following.err
    script.end("digits-2", 0, SUCCEEDED)
    assert following.end() == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1\ndef f(:\n", "digits.py:2: invalid syntax; fix the script"),
        ("if True:\nx\n", "digits.py:2: expected an indented block"),
        ("x = 'a\n", "digits.py:1: unterminated string literal"),
        ("x = 1\0\n", "digits.py"),
    ],
)
def test_a_script_that_does_not_compile_is_not_sent(written: WrittenCluster, text: str, said: str) -> None:
    (written.work / "digits.py").write_text(text)
    done = written.run("train", "digits.py", code=2)
    assert done.stderr.startswith(f"error: {said}")
    assert len(done.stderr.splitlines()) == 1
    assert written.store.list("code") == []
    assert queue.newest(written.store) is None


@pytest.mark.slow
def test_a_script_that_cannot_arrive_is_refused_before_anything_is_sent(written: WrittenCluster) -> None:
    outside = written.home / "outside.py"
    outside.write_text("")
    (written.work / "left_out.py").write_text("")
    (written.work / "good.py").write_text("")
    (written.work / ".gitignore").write_text("left_out.py\n")
    for args, said in (
        ([str(outside)], "is outside the working folder"),
        (["../outside.py"], "is outside the working folder"),
        (["left_out.py"], "left_out.py is excluded by .gitignore"),
        (["no.py"], "script no.py does not exist; scripts here: good.py, left_out.py"),
        (["good.py", "--nodes", "4"], "the job needs 4 nodes, but cluster default has at most 3"),
        (["good.py", "--nodes", "0"], "--nodes 0 is too few"),
        (["good.py", "--env", "A"], "--env A is not NAME=VALUE"),
        (["."], "is a folder, not a script"),
    ):
        assert said in written.run("train", *args, code=2).stderr
    assert written.store.list("code") == []
    assert queue.newest(written.store) is None


@pytest.mark.slow
def test_logs_can_be_narrowed_to_a_node_a_rank_and_a_round(written: WrittenCluster) -> None:
    job = written.submit().job
    for number in (1, 2):
        for rank, node in enumerate(("node-0", "node-10")):
            written.log(job, number, node, f"round {number} rank {rank}", rank=rank, at=10 - rank)
    for args, wanted in (
        ([], ["1 1", "1 0", "2 1", "2 0"]),
        (["--node", "node-0"], ["1 0", "2 0"]),
        (["--rank", "1"], ["1 1", "2 1"]),
        (["--round", "2"], ["2 1", "2 0"]),
        (["--round", "2", "--rank", "0"], ["2 0"]),
    ):
        printed = written.run("logs", job, *args).stdout.splitlines()
        assert [line.partition("round ")[2].replace(" rank", "") for line in printed] == wanted
    assert written.run("logs").stdout.splitlines()[:2] == ["node-10/1 | round 1 rank 1", "node-0/0  | round 1 rank 0"]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["--node", "nope"], "has no node nope; there are: node-0, node-1, node-10"),
        (["--rank", "99"], "has no rank 99; there are: 0, 1, 2"),
        (["--round", "99"], "has no round 99; there are: 1, 2"),
        (["--round", "0", "-f"], "has no round 0; there are: 1, 2"),
    ],
)
def test_what_the_job_does_not_have_is_refused_with_what_it_has(
    written: WrittenCluster, asked: list[str], said: str
) -> None:
    job = written.submit().job
    written.round(job, 1, ("node-0", "node-1", "node-10"))
    written.round(job, 2, ("node-0",))
    written.log(job, 1, "node-0", "hello")
    assert written.run("logs", job, "--node", "node-10").stdout == ""  # it was there, and has printed nothing
    written.end(job, 2, SUCCEEDED)
    assert written.run("logs", job, *asked, code=2).stderr == f"error: job {job} {said}\n"


def test_who_follows_a_rank_or_a_node_that_has_no_part_is_told_so(written: WrittenCluster) -> None:
    job = written.submit().job
    written.round(job, 1, ("node-0",))
    following = Following(written.start("logs", "-f", "--rank", "1", "--node", "node-1", job))
    following.wait_for(lambda: len(following.err) == 3, "the round that has neither")
    written.round(job, 2, ("node-0", "node-1"), reason="node-1 joins")
    written.log(job, 2, "node-1", "hello", rank=1)
    written.end(job, 2, SUCCEEDED)
    assert following.end() == 0
    assert following.out == ["node-1/1 | hello"]
    assert following.err[1:4] == [
        "· round 1 has no rank 1; there are: 1, from 0",
        "· round 1 has no node node-1; there are: node-0",
        "· round 2: node-1 joins, 2 nodes",
    ]


def test_logs_as_json_are_one_object_a_line(written: WrittenCluster) -> None:
    job = written.submit().job
    written.log(job, 3, "node-0", "a", "b")
    lines = [json.loads(line) for line in written.run("logs", "-o", "json").stdout.splitlines()]
    assert [line["text"] for line in lines] == ["a", "b"]
    assert lines[0] == {
        "round": 3,
        "node": "node-0",
        "t": 0,
        "rank": 0,
        "local_rank": 0,
        "stream": "stdout",
        "text": "a",
    }


def test_of_a_bar_that_redraws_itself_only_the_last_state_is_shown(written: WrittenCluster) -> None:
    job = written.submit().job
    written.log(job, 1, "node-0", " 10%\r 50%\r100%", "done\r")
    assert written.run("logs", job).stdout.splitlines() == ["node-0/0 | 100%", "node-0/0 | done"]


class Bar:
    """A rank's output whose last line is not at its end yet."""

    def __init__(self, cluster: WrittenCluster, job: str) -> None:
        self._writer = ChunkWriter(cluster.store, layout.chunks(layout.logs(job), 1, "node-0"))

    def say(self, text: str, at: float, *, partial: bool = True, rank: int = 0) -> None:
        line = {"t": at, "rank": rank, "text": text, **({"partial": True} if partial else {})}
        self._writer.append(msgspec.json.encode(line) + b"\n")


def test_a_bar_is_a_line_of_the_log_only_while_nothing_follows_it(written: WrittenCluster) -> None:
    bar = Bar(written, job := written.submit().job)
    bar.say(" 10%", 1)
    bar.say(" 50%", 4)
    assert written.run("logs", job).stdout == "node-0/0 |  50%\n"
    bar.say("100%", 100, partial=False)
    bar.say("next  1%", 101)
    assert written.run("logs", job).stdout.splitlines() == ["node-0/0 | 100%", "node-0/0 | next  1%"]


def test_who_follows_without_a_terminal_sees_a_bar_now_and_then(written: WrittenCluster) -> None:
    job = written.submit().job
    written.round(job, 1, ("node-0",))
    bar = Bar(written, job)
    for at in range(0, 65, 5):
        bar.say(f"{at}%", at)
    bar.say("100%", 70, partial=False)
    written.end(job, 1, SUCCEEDED)
    assert written.run("logs", "-f", job).stdout.splitlines() == [f"node-0/0 | {n}%" for n in (30, 60, 100)]


def test_on_a_terminal_a_bar_stands_in_the_last_line_and_the_next_one_replaces_it(written: WrittenCluster) -> None:
    job = written.submit().job
    written.round(job, 1, ("node-0",))
    bar = Bar(written, job)
    bar.say("\033[1m 10%\033[0m" + "x" * 200, 1)
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (24, 40))
    command = [sys.executable, "-m", "gpuctl.cli.main", "logs", "-f", job]
    # pytest's workers have the width of pytest's own terminal.
    env = {**{key: value for key, value in written.env.items() if key not in ("COLUMNS", "LINES")}, "TERM": "xterm"}
    process = subprocess.Popen(command, stdout=slave, stderr=slave, stdin=slave, env=env, cwd=written.work)
    os.close(slave)
    screen = ""

    def shows(text: str) -> bool:
        nonlocal screen
        if select.select([master], [], [], 0)[0]:
            screen += os.read(master, 4096).decode()
        return text in screen

    try:
        until(lambda: shows("node-0/0 |  10%" + "x" * 24 + "\033[K"), "the bar, as wide as the terminal")
        bar.say("done", 5, partial=False, rank=1)
        until(lambda: shows("\r\033[Jnode-0/1 | done\r\nnode-0/0 |  10%"), "a line above the bar")
        bar.say("100%", 6, partial=False)
        written.end(job, 1, SUCCEEDED)
        until(lambda: shows("\r\033[Jnode-0/0 | 100%\r\n"), "the end of the bar")
        until(lambda: shows(f"job {job} succeeded"), "the end")
        assert process.wait(30) == 0
    finally:
        process.kill()
        os.close(master)


def test_following_a_finished_job_shows_all_of_it_and_its_end(written: WrittenCluster) -> None:
    job = written.submit().job
    written.round(job, 1, ("node-0",))
    written.log(job, 1, "node-0", *map(str, range(100)))
    written.end(job, 1, JobOutcome(result="cancelled", exit_code=130, message="cancelled"))
    done = written.run("logs", "-f", job, code=130)
    assert len(done.stdout.splitlines()) == 100
    assert f"job {job} was cancelled" in done.stderr


def test_the_spec_in_the_bucket_is_what_an_agent_decodes(script: WrittenCluster) -> None:
    script.run("train", "digits.py", "-d")
    data = script.store.get(layout.job_spec("digits-1"))
    assert decode(data or b"", JobSpec, "spec").number == 1
