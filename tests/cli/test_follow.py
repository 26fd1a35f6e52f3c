"""``train`` and ``logs``: the tests write what rank 0 and the agents would."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable

import pytest

from gpuctl.cluster import jobs, layout
from gpuctl.cluster.packing import unpack
from gpuctl.cluster.records import JobSpec, Outcome, decode
from tests.cli.written import WrittenCluster, wait_for

SUCCEEDED = Outcome(result="succeeded", exit_code=0)


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
        wait_for(lambda: condition() or self.process.poll() is not None, what)
        assert condition(), f"{what} never came\n{self.out}\n{self.err}"

    def end(self) -> int:
        code = self.process.wait(timeout=30)
        self._reading_out.join(timeout=30)
        self._reading_err.join(timeout=30)
        return code


def start(cluster: WrittenCluster, *args: str) -> tuple[Following, JobSpec]:
    following = Following(cluster.start(*args))
    following.wait_for(lambda: jobs.newest(cluster.store), "the job in line")
    return following, jobs.find(cluster.store, None)


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
    spec = jobs.find(script.store, "digits-1")
    assert (spec.script, spec.args, spec.env) == ("digits.py", ("--lr", "0.1"), {"A": "file", "B": "x y"})
    assert (spec.nodes_min, spec.nodes_max, spec.nproc, spec.max_restarts) == (1, 2, 2, 2)
    code = script.store.get(layout.code(spec.code))
    assert code is not None
    unpack(code, script.home / "out", spec.code)
    assert sorted(p.name for p in (script.home / "out").iterdir()) == [".gitignore", "digits.py", "gpuctl.yaml"]
    again = script.run("train", "digits.py", "-d")
    assert "already there" in again.stderr
    assert jobs.find(script.store, "digits-2").code == spec.code


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
        f"job {spec.job} is in line (Ctrl-C leaves it running)",
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
    script.end(spec.job, 1, Outcome(result="failed", exit_code=3, message=what, traceback=trace))
    assert following.end() == 3
    assert following.out == ["node-1/2 | last words"]
    assert following.err[-4:-1] == trace.splitlines()
    assert following.err[-1] == f"error: job {spec.job} failed: {what}; all it printed: gpuctl logs {spec.job}"


def test_ctrl_c_leaves_the_job_running_and_says_how_to_come_back(script: WrittenCluster) -> None:
    following, spec = start(script, "train", "digits.py")
    following.wait_for(lambda: any("in line" in line for line in following.err), "that it is in line")
    os.kill(following.process.pid, signal.SIGINT)
    assert following.end() == 130
    assert following.err[-3:] == [
        f"left {spec.job} running",
        f"  come back: gpuctl logs -f {spec.job}",
        f"  end it:    gpuctl cancel {spec.job}",
    ]
    assert script.store.get(layout.cancel(spec.job)) is None
    assert jobs.outcome(script.store, spec.job) is None
    script.round(spec.job, 1, ("node-0",))
    script.log(spec.job, 1, "node-0", "still here")
    back = Following(script.start("logs", "-f"))
    back.wait_for(lambda: back.out, "its output")
    script.end(spec.job, 1, SUCCEEDED)
    assert back.end() == 0
    assert back.out == ["node-0/0 | still here"]


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
        ("x = 1\ndef f(:\n", "digits.py:2: invalid syntax; mend the script"),
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
    assert jobs.newest(written.store) is None


def test_a_script_that_cannot_arrive_is_refused_before_anything_is_sent(written: WrittenCluster) -> None:
    outside = written.home / "outside.py"
    outside.write_text("")
    (written.work / "left_out.py").write_text("")
    (written.work / "good.py").write_text("")
    (written.work / ".gitignore").write_text("left_out.py\n")
    for args, said in (
        ([str(outside)], "is outside of the working folder"),
        (["../outside.py"], "is outside of the working folder"),
        (["left_out.py"], "left_out.py is left out by .gitignore"),
        (["no.py"], "there is no script no.py; scripts here: good.py, left_out.py"),
        (["good.py", "--nodes", "4"], "the job wants 4 nodes and cluster default has at most 3"),
        (["good.py", "--nodes", "0"], "--nodes 0 is no node at all"),
        (["good.py", "--env", "A"], "--env A is not NAME=VALUE"),
        (["."], "there is no script ."),
    ):
        assert said in written.run("train", *args, code=2).stderr
    assert written.store.list("code") == []
    assert jobs.newest(written.store) is None


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
        (["--round", "9"], []),
    ):
        printed = written.run("logs", job, *args).stdout.splitlines()
        assert [line.partition("round ")[2].replace(" rank", "") for line in printed] == wanted
    assert written.run("logs").stdout.splitlines()[:2] == ["node-10/1 | round 1 rank 1", "node-0/0  | round 1 rank 0"]


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


def test_following_a_finished_job_shows_all_of_it_and_its_end(written: WrittenCluster) -> None:
    job = written.submit().job
    written.round(job, 1, ("node-0",))
    written.log(job, 1, "node-0", *map(str, range(100)))
    written.end(job, 1, Outcome(result="cancelled", exit_code=130, message="cancelled"))
    done = written.run("logs", "-f", job, code=130)
    assert len(done.stdout.splitlines()) == 100
    assert f"job {job} was cancelled" in done.stderr


def test_the_spec_in_the_bucket_is_what_an_agent_decodes(script: WrittenCluster) -> None:
    script.run("train", "digits.py", "-d")
    data = script.store.get(layout.job_spec("digits-1"))
    assert decode(data or b"", JobSpec, "spec").number == 1
