"""A disk without room is told as such."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.written_cluster import WrittenCluster


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A folder on a disk of a megabyte."""
    folder = tmp_path / "small"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True)
    if done.returncode:
        pytest.skip(f"needs the right to mount: {done.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)


def fill(folder: Path) -> Path:
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"\0" * 4096)
        except OSError:
            return ballast


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
