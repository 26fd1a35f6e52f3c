"""``down`` with the local provider, whose nodes are all gone, and with one that leaves something."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from gpuctl.cli.main import run
from gpuctl.cluster import layout
from gpuctl.cluster.jobs import queue
from gpuctl.cluster.records.rounds import JobOutcome
from gpuctl.stacks.providers import interface
from tests.fakes.written_cluster import WrittenCluster

STUBBORN = """
from gpuctl.stacks.providers.local import LocalProvider

class Stubborn(LocalProvider):
    def down(self, cluster, *, force=False):
        return ["machine i-1", "disk vol-2"]
"""
ENDED_BY = """
import os, sys
from gpuctl.cli.main import main
from gpuctl.cluster.errors import INTERRUPTED, GpuctlError
from gpuctl.stacks.providers import interface
from gpuctl.stacks.providers.local import LocalProvider

number, is_told = int(sys.argv[1]), sys.argv[2] == "told"

class Ended(LocalProvider):
    def down(self, cluster, *, force=False):
        try:
            os.kill(os.getpid(), number)
        except KeyboardInterrupt:
            if not is_told:
                raise
            error = GpuctlError("half of it is there", "run `gpuctl down` again")
            error.exit_code = INTERRUPTED
            raise error

interface._PROVIDERS["local"] = "__main__:Ended"
main(["down"])
"""


def test_jobs_that_are_not_over_end_as_cancelled_and_the_rest_stays(written: WrittenCluster) -> None:
    first, second, third = (written.submit().job for _ in range(3))
    written.end(first, 1, JobOutcome(result="succeeded", exit_code=0))
    written.round(second, 1, ("node-0", "node-1"))
    written.checkpoint(second, 10, {"index.json": b"x" * 1000})
    refused = written.run("down", code=2)
    assert refused.stderr == (
        f"error: {second}, {third} would be cancelled, and there is no terminal to confirm it; add -y\n"
    )
    assert queue.outcome(written.store, second) is None
    done = written.run("down", "-y")
    for job in (second, third):
        outcome = queue.outcome(written.store, job)
        assert outcome is not None
        assert (outcome.result, outcome.message) == ("cancelled", "the cluster was taken down")
        assert f"job {job} cancelled" in done.stderr
    assert queue.outcome(written.store, first) == JobOutcome(result="succeeded", exit_code=0)
    lines = done.stdout.splitlines()
    assert lines[0] == "cluster default is down"
    assert lines[1].startswith(f"what remains: {written.url} (")
    assert "gpuctl ckpt ls --bucket file://" in done.stderr
    listed = written.run("ckpt", "ls", "--job", second, "--bucket", written.url).stdout
    assert listed.splitlines()[1].split()[0] == "10"
    again = written.run("down", code=2)
    assert "no cluster named 'default'" in again.stderr


@pytest.mark.parametrize("record", [None, b"{"], ids=["gone", "damaged"])
def test_jobs_get_their_last_checkpoint_and_their_end_without_the_clusters_record(
    written: WrittenCluster, record: bytes | None
) -> None:
    """Else the next `up` at that bucket would run them, on machines that cost money."""
    job = written.submit().job
    written.beat("node-0")
    late = time.time() + 3600  # it has one life, whatever else this machine is at
    os.utime(Path(unquote(urlsplit(written.url).path)) / layout.node("node-0"), (late, late))
    if record is None:
        written.store.delete([layout.CLUSTER])
    else:
        written.store.put(layout.CLUSTER, record)
    with written.start("down", "-y") as process:
        assert process.stderr is not None
        said = process.stderr.readline()
        assert said == f"waiting for {job} to end after a last checkpoint, 120 s at most\n"
        written.end(job, 1, JobOutcome(result="succeeded", exit_code=0))
        assert f"job {job} succeeded" in process.communicate(timeout=60)[1]


@pytest.mark.parametrize("record", [None, b"{"], ids=["gone", "damaged"])
def test_jobs_that_nobody_sees_to_end_as_cancelled_without_the_clusters_record(
    written: WrittenCluster, record: bytes | None
) -> None:
    job = written.submit().job
    if record is None:
        written.store.delete([layout.CLUSTER])
    else:
        written.store.put(layout.CLUSTER, record)
    written.run("down", "-y")
    ended = queue.outcome(written.store, job)
    assert ended is not None and ended.result == "cancelled"


def test_checkpoints_of_a_cluster_whose_record_is_damaged_are_not_deleted(written: WrittenCluster) -> None:
    written.store.put(layout.CLUSTER, b"{")
    line = written.run("down", "-y", "--delete-checkpoints", "default", code=2).stderr
    assert "holds a record that cannot be read; leave --delete-checkpoints out" in line


def test_what_is_left_is_named_and_makes_the_exit_non_zero(
    tmp_path: Path, written: WrittenCluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(interface._PROVIDERS, "local", "stubborn:Stubborn")
    monkeypatch.setenv("GPUCTL_STATE_DIR", written.env["GPUCTL_STATE_DIR"])
    monkeypatch.chdir(written.work)
    assert run(["down"]) == 1
    printed = capsys.readouterr()
    assert printed.out == "left: machine i-1\nleft: disk vol-2\n"
    assert printed.err == "error: 2 things could not be removed; run `gpuctl down` again\n"


@pytest.mark.parametrize(
    ("number", "code", "word"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated"), (signal.SIGHUP, 129, "terminated")],
)
@pytest.mark.parametrize("how", ["told", "not told"])
def test_the_exit_code_tells_which_signal_it_was(
    written: WrittenCluster, number: signal.Signals, code: int, word: str, how: str
) -> None:
    """Whether what was interrupted tells something of its own about that, or nothing."""
    done = subprocess.run(
        [sys.executable, "-c", ENDED_BY, str(int(number)), how],
        cwd=written.work,
        env=written.env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    line = "error: half of it is there; run `gpuctl down` again" if how == "told" else word
    assert (done.returncode, done.stderr) == (code, f"{line}\n")
