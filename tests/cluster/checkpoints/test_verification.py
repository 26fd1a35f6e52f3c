"""Whether committed checkpoints are whole, and every byte of them."""

from __future__ import annotations

import threading

import pytest

from gpuctl.cluster.checkpoints import deletion, listing, verification
from gpuctl.cluster.checkpoints.manifest import BLOCK_BYTES
from gpuctl.cluster.storage.bucket import Bucket
from tests.cluster.checkpoints.chains import JOB, chain, entries, faults, flip, state
from tests.fakes.checkpoints import Maker, of_bytes


def test_what_was_committed_is_whole(store: Bucket, maker: Maker) -> None:
    made = chain(maker, 10, 20)
    assert made[1].written < made[1].bytes / 2, "the test is about shared parts"
    checked = verification.check(store, JOB, entries(store))
    assert faults(checked) == {10: [], 20: []}
    read: list[int] = []
    assert faults(verification.verify(store, JOB, checked, read.append)) == {10: [], 20: []}
    assert sum(read) == verification.bytes_to_verify(checked) == made[0].bytes + made[1].written, "each part once"


def test_a_part_that_is_missing_or_cut_short_is_seen_without_reading_it(store: Bucket, maker: Maker) -> None:
    first, second = chain(maker, 10, 20)
    shared, own = (f"{first.path}/00000-0000", f"{second.path}/00001-0011")
    maker.store.delete([shared])
    maker.store.put(own, (maker.store.get(own) or b"")[:-1])
    found = verification.check(store, JOB, entries(store))
    assert faults(found) == {
        10: [f"{shared} is missing"],
        20: [f"{shared} is missing", f"{own} has 1023 bytes, not 1024"],
    }
    assert faults(verification.verify(store, JOB, found)) == faults(found)


def test_a_flipped_bit_is_found_in_every_checkpoint_that_needs_the_part_and_in_no_other(
    store: Bucket, maker: Maker
) -> None:
    first, second = chain(maker, 10, 20)
    third = maker.save(30, {"other": of_bytes(b"x" * 5000)})
    key = f"{first.path}/00001-0003"
    flip(maker, key, 100)
    checked = verification.check(store, JOB, [first, second, third])
    assert all(one.whole for one in checked)
    said = f"{key} is not what was written: bytes 0 to 1024 differ"
    assert faults(verification.verify(store, JOB, checked)) == {10: [said], 20: [said], 30: []}


def test_the_block_that_differs_is_told(store: Bucket) -> None:
    maker = Maker(listing.folder(store, JOB), part_bytes=3 * BLOCK_BYTES)
    entry = maker.save(10, {"model": of_bytes(bytes(2 * BLOCK_BYTES + 10))})
    key = f"{entry.path}/00000-0000"
    flip(maker, key, BLOCK_BYTES + 5)
    checked = verification.check(store, JOB, [entry])
    (found,) = verification.verify(store, JOB, checked)
    assert [fault.what for fault in found.faults] == [
        f"{key} is not what was written: bytes {BLOCK_BYTES} to {2 * BLOCK_BYTES} differ"
    ]
    flip(maker, key, 2 * BLOCK_BYTES)
    (found,) = verification.verify(store, JOB, checked)
    assert [fault.what for fault in found.faults] == [
        f"{key} is not what was written: 2 of its 3 blocks differ, the first at byte {BLOCK_BYTES}"
    ]


def test_a_part_of_another_step_is_no_part_of_this_one(store: Bucket, maker: Maker) -> None:
    first, second = maker.save(10, state(10)), maker.save(20, state(20))
    key = f"{second.path}/00001-0011"
    maker.store.put(key, maker.store.get(f"{first.path}/00001-0011") or b"")
    found = verification.verify(store, JOB, verification.check(store, JOB, entries(store)))
    assert faults(found) == {10: [], 20: [f"{key} is not what was written: bytes 0 to 1024 differ"]}


@pytest.mark.parametrize("harm", ["missing", "garbled", "of another step"])
def test_a_manifest_that_cannot_be_read_is_a_fault_of_its_own(store: Bucket, maker: Maker, harm: str) -> None:
    first, second = chain(maker, 10, 20)
    key = f"{second.path}/manifest.json"
    if harm == "missing":
        maker.store.delete([key])
    elif harm == "garbled":
        flip(maker, key, 7)
    else:
        maker.store.put(key, maker.store.get(f"{first.path}/manifest.json") or b"")
    found = verification.check(store, JOB, entries(store))
    said = "is missing" if harm == "missing" else "is not what was written"
    assert faults(found) == {10: [], 20: [f"{key} {said}"]}
    assert faults(verification.verify(store, JOB, found)) == faults(found)


def test_a_restore_takes_the_newest_that_is_whole(store: Bucket, maker: Maker) -> None:
    made = chain(maker, 10, 20, 30)
    maker.store.delete([f"{made[2].path}/manifest.json"])
    found = verification.check(store, JOB, entries(store))
    assert verification.restored(found) == made[1]
    assert verification.restored(found[2:]) is None


def test_a_checkpoint_that_the_job_removes_while_it_is_looked_at_is_not_damaged(store: Bucket, maker: Maker) -> None:
    gone, stays = maker.save(10, state(10)), maker.save(20, state(20))
    checked = verification.check(store, JOB, [gone, stays])
    one_at_a_time = threading.Lock()

    def on_bytes(_: int) -> None:
        with one_at_a_time:
            deletion.remove(store, JOB, [gone])

    assert faults(verification.verify(store, JOB, checked, on_bytes)) == {20: []}
    assert faults(verification.check(store, JOB, [gone, stays])) == {20: []}
