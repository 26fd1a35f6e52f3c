"""A node's disk that is full, and has room again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuctl.stacks.providers import processes
from tests.e2e.machine import Cluster
from tests.fakes.small_disk import fill, mounted


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Cluster]:
    """A machine whose state folder, with the bucket in it, is on a small disk."""
    with mounted(tmp_path / "disk", "24m") as disk:
        cluster = Cluster(disk / "state", tmp_path / "work")
        cluster.lease_s = 3.0
        try:
            yield cluster
        finally:
            cluster.end()


@pytest.mark.slow
def test_nodes_without_work_outlive_a_full_disk_and_take_the_next_job(small: Cluster) -> None:
    small.up("2")
    before = {name: record.incarnation for name, record in small.nodes().items()}
    ballast = fill(small.state)
    small.wait(lambda: "silent" in small.run("status").stdout, "the nodes to have been silent for some leases")
    ballast.unlink()
    small.wait(lambda: "2 of 2 nodes live" in small.run("status").stdout, "the nodes to be heard of again")
    small.run("train", small.write("hello.py", "print('hello')"))
    assert {name: record.incarnation for name, record in small.nodes().items()} == before


@pytest.mark.slow
def test_up_on_a_disk_that_is_nearly_full_makes_nothing_and_is_repeated(small: Cluster) -> None:
    said = set()
    for pages in range(0, 11, 2):
        ballast = fill(small.state.parent, but=pages * 4096)
        said.add(small.run("up", "--nodes", "2", code=1).stderr)
        ballast.unlink()
    assert processes.marked_processes(small.state) == []
    full = "No space left on device; free some space\n"
    assert said <= {
        f"error: no room for 2 nodes on the disk that holds {small.state}; free some space\n",
        f"error: cannot use the state folder {small.state}: {full}",
    }
    small.up("2")
