"""A disk without room is told as such."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.small_disk import fill, mounted
from tests.fakes.written_cluster import WrittenCluster


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A folder on a disk of a megabyte."""
    with mounted(tmp_path / "small", "1m") as folder:
        yield folder


@pytest.mark.slow
def test_a_full_bucket_is_why_nobody_is_heard_of(small: Path, tmp_path: Path) -> None:
    cluster = WrittenCluster(tmp_path, (small / "bucket").as_uri())
    cluster.lead("node-0", view={"node-0": "live"})
    job = cluster.submit().job
    cluster.round(job, 1, ("node-0",))
    past = 1_000_000_000
    os.utime(small / "bucket" / "nodes" / "node-0.json", (past, past))
    what = f"no space left on the disk that holds {small / 'bucket'}"
    assert what not in cluster.run("status").stdout
    ballast = fill(small)
    assert what in cluster.run("status").stdout.splitlines()
    following = cluster.start("logs", "-f", job)
    try:
        assert following.stderr
        said = next(line for line in following.stderr if "has reported" in line)
        assert said == f"· no node has reported for a while: {what}; free some space, and the job goes on\n"
    finally:
        following.kill()
        following.communicate()
    ballast.unlink()
    assert what not in cluster.run("status").stdout


def test_a_node_whose_disk_is_full_says_so(written: WrittenCluster) -> None:
    written.lead("node-0", view={"node-0": "live"}, trouble="no space left on the disk that holds /x")
    assert "node-0: no space left on the disk that holds /x" in written.run("status").stdout.splitlines()
