"""The copies of the last checkpoint on the nodes' disks: who has them, who reads them, and that none is needed."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuctl.cluster.checkpoints import listing
from gpuctl.cluster.checkpoints.manifest import MANIFEST, Part, digest
from gpuctl.cluster.checkpoints.replica_layout import ReplicaMap
from gpuctl.cluster.storage.bucket import open_bucket
from gpuctl.trainers.checkpoint.replicas import ReplicaWriter
from tests.trainers.rank_scripts import replicating
from tests.trainers.rank_scripts.checkpointing import same
from tests.trainers.rank_scripts.replicating import JOB, Nodes
from tests.trainers.ranks import Ended, Ranks, run


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    nodes = Nodes(tmp_path)
    nodes.start("a", "b", "c")
    yield nodes
    nodes.stop()


def lose_parts_of_bucket(nodes: Nodes) -> None:
    """What is restored from now on has come from somewhere else."""
    place = nodes.folder / "bucket" / "jobs" / JOB / "checkpoints"
    parts = [path for path in place.glob("*-r*/*") if path.name != MANIFEST]
    assert parts
    for part in parts:
        part.unlink()


def restored(nodes: Nodes, number: int, names: list[str]) -> list[Ended]:
    with Ranks(len(names), replicating.restore, nodes.begin(number, names)) as ranks:
        return ranks.wait()


def test_survivors_restore_from_their_own_disks_and_from_each_other_without_the_bucket(nodes: Nodes) -> None:
    saved, *_ = run(3, replicating.save_some, nodes.begin(1, ["a", "b", "c"]), [1, 2])
    entry = listing.committed(open_bucket(f"file://{nodes.folder}/bucket"), JOB)[-1]
    assert entry.nodes == ("a", "b", "c")
    lose_parts_of_bucket(nodes)
    # c is lost. What it had, a has as its neighbour.
    ends = restored(nodes, 2, ["a", "b"])
    for end in ends:
        assert end.code == 0, end.said
        step, found = end.value
        assert step == 2
        assert same(found, saved)
    assert "step 2 is restored: " in ends[0].said
    assert "MB from this node" in ends[0].said
    assert "MB from b" in ends[0].said
    assert "bucket" not in ends[0].said


def test_a_node_that_is_new_reads_from_those_that_have_it(nodes: Nodes) -> None:
    saved, *_ = run(2, replicating.save_some, nodes.begin(1, ["a", "b"]), [1])
    lose_parts_of_bucket(nodes)
    ends = restored(nodes, 2, ["a", "c"])
    assert [end.code for end in ends] == [0, 0], ends
    assert same(ends[1].value[1], saved)
    assert "from this node" not in ends[1].said


def test_only_the_last_one_stays(nodes: Nodes) -> None:
    run(2, replicating.save_some, nodes.begin(1, ["a", "b"]), [1, 2, 3])
    entry = listing.committed(open_bucket(f"file://{nodes.folder}/bucket"), JOB)[-1]
    run(2, replicating.restore, nodes.begin(2, ["a", "b"]))
    for name in ("a", "b"):
        assert {copy.partition("/")[0] for copy in nodes.copies(name)} == {entry.path}
    assert nodes.copies("a") == nodes.copies("b"), "of two nodes, each has all"
    run(2, replicating.save_some, nodes.begin(3, ["a", "b"]), [4])
    assert {copy.partition("/")[0] for copy in nodes.copies("a")} == {"4-r3." + nodes.copies("a")[0].split(".")[1][:6]}


@pytest.mark.parametrize("harm", ["changed", "cut", "missing"])
def test_a_copy_that_is_not_what_was_written_is_passed_over(nodes: Nodes, harm: str) -> None:
    saved, *_ = run(2, replicating.save_some, nodes.begin(1, ["a", "b"]), [1])
    for name in ("a", "b"):
        for copy in nodes.copies(name):
            path = nodes.tier(name) / copy
            data = path.read_bytes()
            if harm == "missing":
                path.unlink()
            else:
                path.write_bytes(data[:-1] if harm == "cut" else bytes([data[0] ^ 1]) + data[1:])
    ends = restored(nodes, 2, ["a", "b"])
    assert [end.code for end in ends] == [0, 0], ends
    assert same(ends[0].value[1], saved)
    assert "from the bucket" in ends[0].said
    assert "this node" not in ends[0].said


def test_a_neighbour_that_is_gone_costs_a_line_and_no_checkpoint(nodes: Nodes, tmp_path: Path) -> None:
    envs = nodes.begin(1, ["a", "b"])
    nodes.stop()
    with Ranks(2, replicating.save_some, envs, [1, 2]) as ranks:
        ends = ranks.wait()
    assert [end.code for end in ends] == [0, 0], ends
    assert ends[0].said.count("no more replicas of checkpoints on the peer b: ") == 1
    entries = listing.committed(open_bucket(f"file://{tmp_path}/bucket"), JOB)
    assert [(entry.step, entry.nodes) for entry in entries] == [(1, ("a", "b")), (2, ("a", "b"))], "their own stay"
    nodes.start("a", "b")


def test_a_full_disk_costs_a_line_and_no_checkpoint(nodes: Nodes) -> None:
    small = nodes.folder / "a"
    small.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(small)], capture_output=True)
    if done.returncode != 0:
        pytest.skip("a small disk needs root and Linux")
    try:
        envs = nodes.begin(1, ["a", "b"])
        (small / "filler").write_bytes(bytes(shutil.disk_usage(small).free))
        with Ranks(2, replicating.save_some, envs, [1, 2]) as ranks:
            ends = ranks.wait()
        assert [end.code for end in ends] == [0, 0], ends
        assert ends[0].said.count("no more replicas of checkpoints on this node: [Errno 28] No space left") == 1
        assert ends[1].said.count("no more replicas of checkpoints on the peer a: its disk is full") == 1
        entries = listing.committed(open_bucket(f"file://{nodes.folder}/bucket"), JOB)
        assert [(entry.step, entry.nodes) for entry in entries] == [(1, ("b",)), (2, ("b",))]
        assert nodes.copies("a") == []
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_a_neighbour_that_says_nothing_is_waited_for_once(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        places = ReplicaMap(
            node="a",
            folder=str(tmp_path),
            job=JOB,
            token="secret",
            neighbour="b",
            places={"b": f"127.0.0.1:{silent.getsockname()[1]}"},
        )
        said: list[str] = []
        copies = ReplicaWriter(places, 0, said.append, silent_s=0.2)
        part = Part("1-r1.aa-0/00000-0000", 4, (digest(b"data"),))
        assert copies.keep("1-r1.aa-0", part, memoryview(b"data")) == ("a",)
        assert copies.keep("1-r1.aa-0", part, memoryview(b"data")) == ("a",)
    assert said == ["no more replicas of checkpoints on the peer b: timed out; checkpoints are still in the bucket"]


def test_what_the_bucket_has_lost_is_written_anew_though_the_nodes_have_it(nodes: Nodes) -> None:
    run(1, replicating.save_some, nodes.begin(1, ["a"]), [1])
    lose_parts_of_bucket(nodes)
    with Ranks(2, replicating.save_unchanged, nodes.begin(2, ["a", "b"]), 2) as ranks:
        ends = ranks.wait()
    assert [end.code for end in ends] == [0, 0], ends
    assert "MB from this node" in ends[0].said
    assert "bucket has lost" in ends[0].said
    assert "writing the checkpoint of step 2 in full" in ends[0].said
    shutil.rmtree(nodes.tier("a"))
    shutil.rmtree(nodes.tier("b"))
    (end,) = restored(nodes, 3, ["c"])
    assert end.code == 0, end.said
    step, found = end.value
    assert (step, same(found, ends[0].value)) == (2, True)
