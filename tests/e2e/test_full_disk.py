"""A node's disk that is full, and has room again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuctl.cluster import layout
from gpuctl.stacks.providers import processes
from tests.e2e.machine import Cluster
from tests.e2e.scripts import COUNTING
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


@pytest.mark.slow
def test_a_job_goes_on_where_what_it_prints_has_no_room_and_tells_how_much_is_missing(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    with mounted(state / "local", "24m") as disk:
        cluster = Cluster(state, tmp_path / "work")
        try:
            cluster.up("1")
            gate, here = tmp_path / "gate", tmp_path / "here"
            script = """
                import pathlib, sys, time
                gate, here = map(pathlib.Path, sys.argv[1:])
                print("begun", flush=True)
                here.write_text("waits")
                while not gate.exists():
                    time.sleep(0.02)
                for number in range(1000):
                    print("a line with some words in it", number, flush=True)
                print("an error", file=sys.stderr)
                here.write_text("printed")
                while gate.exists():
                    time.sleep(0.02)
                print("done")
            """
            job = cluster.train(cluster.write("talk.py", script), "--", str(gate), str(here))
            cluster.wait(lambda: here.exists() and here.read_text() == "waits", "the script to have begun")
            ballast = fill(disk)
            gate.touch()
            cluster.wait(lambda: here.read_text() == "printed", "all to be printed")
            cluster.wait(lambda: "no space left on the disk" in cluster.run("status").stdout, "status to tell of it")
            ballast.unlink()
            gate.unlink()
            ended = cluster.wait_for_end(job)
            assert ended.outcome is not None and ended.outcome.result == "succeeded"
            lines = cluster.run("logs", job).stdout.splitlines()
            assert lines[0].endswith("| begun") and lines[-1].endswith("| done")
            assert lines[-2].endswith(" bytes of output are missing here: the disk was full")
        finally:
            cluster.end()


@pytest.mark.slow
def test_a_job_goes_on_where_the_bucket_is_full_for_many_leases_and_has_room_again(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    with mounted(state / "buckets", "8m") as disk:
        cluster = Cluster(state, tmp_path / "work")
        cluster.lease_s = 3.0
        try:
            cluster.up("2")
            script = cluster.write("count.py", COUNTING)
            job = cluster.train(script, "--", "--steps", "100000", "--every", "5", "--rest", "0.05")
            cluster.wait(lambda: cluster.checkpoints(job).entries, "a checkpoint")
            before = {name: record.incarnation for name, record in cluster.nodes().items()}
            ballast = fill(disk)
            cluster.wait(lambda: _silent_s(cluster) > 4 * cluster.lease_s, "some leases to have passed")
            assert "no space left on the disk" in cluster.run("status").stdout
            last = cluster.checkpoints(job).entries[-1].step
            ballast.unlink()
            cluster.wait(lambda: cluster.checkpoints(job).entries[-1].step > last, "another checkpoint")
            cluster.wait(lambda: "2 of 2 nodes live" in cluster.run("status").stdout, "the nodes to be heard of again")
            assert {entry.number for entry in cluster.history(job)} == {1}, "the round of the beginning goes on"
            assert {name: record.incarnation for name, record in cluster.nodes().items()} == before
            told = cluster.run("logs", job, "--rank", "0").stdout
            assert told.count("has to wait: the bucket") == 1
        finally:
            cluster.end()


def _silent_s(cluster: Cluster) -> float:
    """Since a heartbeat came last."""
    return time.time() - max(entry.modified for entry in cluster.bucket.list(layout.NODES))
