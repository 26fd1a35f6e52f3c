"""``down`` with the local provider, whose nodes are all gone, and with one that leaves something."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuctl.cli.main import run
from gpuctl.cluster import jobs
from gpuctl.cluster.records import Outcome
from gpuctl.stacks import provider
from tests.cli.written import WrittenCluster

STUBBORN = """
class Stubborn:
    def down(self, cluster, say, *, force=False):
        return ["machine i-1", "disk vol-2"]
"""


def test_jobs_that_are_not_over_end_as_cancelled_and_the_rest_stays(written: WrittenCluster) -> None:
    first, second, third = (written.submit().job for _ in range(3))
    written.end(first, 1, Outcome(result="succeeded", exit_code=0))
    written.round(second, 1, ("node-0", "node-1"))
    written.checkpoint(second, 10, {"index.json": b"x" * 1000})
    done = written.run("down")
    for job in (second, third):
        outcome = jobs.outcome(written.store, job)
        assert outcome is not None
        assert (outcome.result, outcome.message) == ("cancelled", "the cluster was taken down")
        assert f"job {job} cancelled" in done.stderr
    assert jobs.outcome(written.store, first) == Outcome(result="succeeded", exit_code=0)
    lines = done.stdout.splitlines()
    assert lines[0] == "cluster default is down"
    assert lines[1].startswith(f"what stays: {written.url} (")
    assert "gpuctl ckpt ls --bucket file://" in done.stderr
    listed = written.run("ckpt", "ls", "--job", second, "--bucket", written.url).stdout
    assert listed.splitlines()[1].split()[0] == "10"
    again = written.run("down", code=2)
    assert "there is no cluster named 'default'" in again.stderr


def test_what_is_left_is_named_and_makes_the_exit_non_zero(
    tmp_path: Path, written: WrittenCluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(provider._PROVIDERS, "local", "stubborn:Stubborn")
    monkeypatch.setenv("GPUCTL_STATE_DIR", written.env["GPUCTL_STATE_DIR"])
    monkeypatch.chdir(written.work)
    assert run(["down"]) == 1
    printed = capsys.readouterr()
    assert printed.out == "left: machine i-1\nleft: disk vol-2\n"
    assert printed.err == "error: 2 things could not be taken away; run `gpuctl down` again\n"
