"""Copies of the last checkpoint: where they lie, what of them may go, and that a disk is not filled with them."""

from __future__ import annotations

import errno
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuctl.cluster.checkpoints import replica_layout
from gpuctl.cluster.errors import GpuctlError
from gpuctl.cluster.records.rounds import Member, Round

SAVE = "100-r3.a1b2-7"
PART = "50-r2.ffff-0/00003-0001"


def round_of(*ports: int) -> Round:
    members = tuple(
        Member(node=f"node-{n}", incarnation="i", address=f"10.0.0.{n}", nproc=1, tier_port=port)
        for n, port in enumerate(ports)
    )
    return Round(job="job-1", number=1, phase="run", epoch=1, members=members)


@pytest.mark.parametrize(
    ("ports", "rank", "neighbour"),
    [((1, 2, 3), 0, "node-1"), ((1, 2, 3), 2, "node-0"), ((1,), 0, None), ((1, 0, 3), 0, "node-2"), ((0, 2), 0, None)],
)
def test_the_neighbour_is_the_next_node_by_rank_that_serves_copies(
    ports: tuple[int, ...], rank: int, neighbour: str | None
) -> None:
    places = replica_layout.map_of(round_of(*ports), rank, Path("/t"), "secret")
    assert (places.node, places.neighbour) == (f"node-{rank}", neighbour)
    assert places.places == {f"node-{n}": f"10.0.0.{n}:{port}" for n, port in enumerate(ports) if port}


@pytest.mark.parametrize("save", ["", "..", "100-r3.a1b2-7/..", "100", "100-r3.a1b2", ".100-r3.a1b2-7"])
def test_no_name_of_a_save_leads_elsewhere(save: str) -> None:
    with pytest.raises(GpuctlError):
        replica_layout.path_of(Path("/t"), save, PART)


@pytest.mark.parametrize("part", ["", "..", "../00003-0001", f"{SAVE}/../../x", f"{SAVE}/x", "/etc/passwd"])
def test_no_name_of_a_part_leads_elsewhere(part: str) -> None:
    with pytest.raises(GpuctlError):
        replica_layout.path_of(Path("/t"), SAVE, part)
    assert replica_layout.path_of(Path("/t"), SAVE, PART) == Path(f"/t/{SAVE}/50-r2.ffff-0+00003-0001")


def test_what_came_before_the_committed_one_goes_and_what_these_processes_began_since_stays() -> None:
    before = ["90-r3.a1b2-6", "120-r2.ffff-9", "110-r3.cccc-9", "stray"]
    since = ["110-r3.a1b2-8", SAVE]
    assert replica_layout.outdated([*since, *before], SAVE) == before


def test_a_copy_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    path = replica_layout.path_of(tmp_path, SAVE, PART)

    def cut() -> Iterator[bytes]:
        yield b"abc"
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        replica_layout.write(path, 6, cut())
    assert list(path.parent.iterdir()) == []
    replica_layout.write(path, 6, [b"abc", memoryview(b"def")])
    assert path.read_bytes() == b"abcdef"


def test_a_part_that_did_not_change_takes_no_room(tmp_path: Path) -> None:
    old, new = (replica_layout.path_of(tmp_path, save, PART) for save in ("50-r2.ffff-0", SAVE))
    assert not replica_layout.link(new, old)
    replica_layout.write(old, 3, [b"abc"])
    assert replica_layout.link(new, old)
    assert replica_layout.link(new, old), "once more is no harm"
    assert new.samefile(old)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], capture_output=True)
    if done.returncode != 0:
        pytest.skip("a small disk needs root and Linux")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_room_is_left_on_the_disk(small_disk: Path) -> None:
    with pytest.raises(OSError, match="No space left") as raised:
        replica_layout.write(replica_layout.path_of(small_disk, SAVE, PART), 1_000_000, [bytes(1_000_000)])
    assert raised.value.errno == errno.ENOSPC
    replica_layout.write(replica_layout.path_of(small_disk, SAVE, PART), 900_000, [bytes(900_000)])
