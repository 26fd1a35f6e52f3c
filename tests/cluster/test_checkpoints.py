"""Committed checkpoints from outside of their job: whole or not, every byte of them, and what deleting them frees."""

from __future__ import annotations

import _thread
import random
import threading
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpuctl.cluster import checkpoints, commits, jobs, layout
from gpuctl.cluster.blocks import AT_ONCE, each
from gpuctl.cluster.bucket import Bucket, open_bucket
from gpuctl.cluster.commits import Commits
from gpuctl.cluster.errors import BadInput, Damaged, Fenced
from gpuctl.cluster.manifest import BLOCK_BYTES, read_manifest
from gpuctl.cluster.records import CheckpointEntry, Outcome, Round
from gpuctl.cluster.retention import Retention
from tests.cluster.made import Maker, of_bytes

JOB = "digits-1"
FROZEN = {"backbone": of_bytes(random.Random(0).randbytes(10_240))}


@pytest.fixture
def store(bucket_url: str) -> Bucket:
    return open_bucket(bucket_url)


@pytest.fixture
def maker(store: Bucket) -> Maker:
    return Maker(checkpoints.folder(store, JOB), part_bytes=1024)


def state(step: int) -> dict[str, object]:
    """Most of it never changes."""
    return {"model": {**FROZEN, "head": of_bytes(bytes([step % 256]) * 3000)}}


def chain(maker: Maker, *steps: int, number: int = 1) -> list[CheckpointEntry]:
    """Each refers to the frozen parts of the one before."""
    made: list[CheckpointEntry] = []
    for step in steps:
        made.append(maker.save(step, state(step), number, base=made[-1] if made else None))
    return made


def objects(maker: Maker) -> dict[str, int]:
    """Sizes of all objects but the ledger's."""
    return {item.key: item.size for item in maker.store.list("") if not item.key.startswith("ledger/")}


def faults(found: list[checkpoints.Checked]) -> dict[int, list[str]]:
    return {one.entry.step: [fault.what for fault in one.faults] for one in found}


def entries(store: Bucket) -> tuple[CheckpointEntry, ...]:
    return checkpoints.committed(store, JOB)


# -- whole or not -----------------------------------------------------------------------------------------------------


def test_what_was_committed_is_whole(store: Bucket, maker: Maker) -> None:
    made = chain(maker, 10, 20)
    assert made[1].written < made[1].bytes / 2, "the test is about shared parts"
    checked = checkpoints.check(store, JOB, entries(store))
    assert faults(checked) == {10: [], 20: []}
    read: list[int] = []
    assert faults(checkpoints.verify(store, JOB, checked, read.append)) == {10: [], 20: []}
    assert sum(read) == checkpoints.bytes_to_verify(checked) == made[0].bytes + made[1].written, "each part once"


def test_a_part_that_is_missing_or_cut_short_is_seen_without_reading_it(store: Bucket, maker: Maker) -> None:
    first, second = chain(maker, 10, 20)
    shared, own = (f"{first.path}/00000-0000", f"{second.path}/00001-0011")
    maker.store.delete([shared])
    maker.store.put(own, (maker.store.get(own) or b"")[:-1])
    found = checkpoints.check(store, JOB, entries(store))
    assert faults(found) == {
        10: [f"{shared} is missing"],
        20: [f"{shared} is missing", f"{own} has 1023 bytes, not 1024"],
    }
    assert faults(checkpoints.verify(store, JOB, found)) == faults(found)


def test_a_flipped_bit_is_found_in_every_checkpoint_that_needs_the_part_and_in_no_other(
    store: Bucket, maker: Maker
) -> None:
    first, second = chain(maker, 10, 20)
    third = maker.save(30, {"other": of_bytes(b"x" * 5000)})
    key = f"{first.path}/00001-0003"
    flip(maker, key, 100)
    checked = checkpoints.check(store, JOB, [first, second, third])
    assert all(one.whole for one in checked)
    said = f"{key} is not what was written: bytes 0 to 1024 differ"
    assert faults(checkpoints.verify(store, JOB, checked)) == {10: [said], 20: [said], 30: []}


def test_the_block_that_differs_is_told(store: Bucket) -> None:
    maker = Maker(checkpoints.folder(store, JOB), part_bytes=3 * BLOCK_BYTES)
    entry = maker.save(10, {"model": of_bytes(bytes(2 * BLOCK_BYTES + 10))})
    key = f"{entry.path}/00000-0000"
    flip(maker, key, BLOCK_BYTES + 5)
    checked = checkpoints.check(store, JOB, [entry])
    (found,) = checkpoints.verify(store, JOB, checked)
    assert [fault.what for fault in found.faults] == [
        f"{key} is not what was written: bytes {BLOCK_BYTES} to {2 * BLOCK_BYTES} differ"
    ]
    flip(maker, key, 2 * BLOCK_BYTES)
    (found,) = checkpoints.verify(store, JOB, checked)
    assert [fault.what for fault in found.faults] == [
        f"{key} is not what was written: 2 of its 3 blocks differ, the first at byte {BLOCK_BYTES}"
    ]


def test_a_part_of_another_step_is_no_part_of_this_one(store: Bucket, maker: Maker) -> None:
    first, second = maker.save(10, state(10)), maker.save(20, state(20))
    key = f"{second.path}/00001-0011"
    maker.store.put(key, maker.store.get(f"{first.path}/00001-0011") or b"")
    found = checkpoints.verify(store, JOB, checkpoints.check(store, JOB, entries(store)))
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
    found = checkpoints.check(store, JOB, entries(store))
    said = "is missing" if harm == "missing" else "is not what was written"
    assert faults(found) == {10: [], 20: [f"{key} {said}"]}
    assert faults(checkpoints.verify(store, JOB, found)) == faults(found)


def test_a_restore_takes_the_newest_that_is_whole(store: Bucket, maker: Maker) -> None:
    made = chain(maker, 10, 20, 30)
    maker.store.delete([f"{made[2].path}/manifest.json"])
    found = checkpoints.check(store, JOB, entries(store))
    assert checkpoints.restored(found) == made[1]
    assert checkpoints.restored(found[2:]) is None


def test_a_checkpoint_that_the_job_removes_while_it_is_looked_at_is_not_damaged(store: Bucket, maker: Maker) -> None:
    gone, stays = maker.save(10, state(10)), maker.save(20, state(20))
    checked = checkpoints.check(store, JOB, [gone, stays])
    one_at_a_time = threading.Lock()

    def on_bytes(_: int) -> None:
        with one_at_a_time:
            checkpoints.remove(store, JOB, [gone])

    assert faults(checkpoints.verify(store, JOB, checked, on_bytes)) == {20: []}
    assert faults(checkpoints.check(store, JOB, [gone, stays])) == {20: []}


def flip(maker: Maker, key: str, at: int) -> None:
    data = bytearray(maker.store.get(key) or b"")
    data[at] ^= 1
    maker.store.put(key, bytes(data))


# -- each -------------------------------------------------------------------------------------------------------------


def test_no_more_than_so_many_blocks_are_on_their_way_and_all_get_done() -> None:
    now, most, done = 0, 0, 0
    lock = threading.Lock()
    full = threading.Event()

    def do(_: int) -> None:
        nonlocal now, most, done
        with lock:
            now, most = now + 1, max(most, now + 1)
            if now == AT_ONCE:
                full.set()
        assert full.wait(30), "they do not run side by side"
        with lock:
            now, done = now - 1, done + 1

    each(range(100), do, lambda *_: None)
    assert (most, done) == (AT_ONCE, 100)


def test_the_first_error_ends_it() -> None:
    begun: list[int] = []

    def do(item: int) -> None:
        begun.append(item)
        if item == 5:
            raise Damaged("five")
        time.sleep(0.001)

    with pytest.raises(Damaged, match="five"):
        each(range(1_000_000), do, lambda *_: None)
    assert len(begun) < 1000


def test_ctrl_c_before_all_have_begun_is_ctrl_c() -> None:
    def do(_: int) -> None:
        _thread.interrupt_main()
        time.sleep(0.001)

    for _ in range(20):
        with pytest.raises(KeyboardInterrupt):
            each(range(1_000_000), do, lambda *_: None)


# -- delete -----------------------------------------------------------------------------------------------------------


def test_removing_tells_beforehand_what_it_frees_and_keeps_what_others_need(store: Bucket, maker: Maker) -> None:
    first, second, _ = chain(maker, 10, 20, 30)
    before = objects(maker)
    told = checkpoints.freed(store, JOB, [first])
    assert checkpoints.remove(store, JOB, [first]) == told == sum(before.values()) - sum(objects(maker).values())
    assert told < first.bytes / 2, "most of it is needed by the others"
    left = checkpoints.verify(store, JOB, checkpoints.check(store, JOB, entries(store)))
    assert faults(left) == {20: [], 30: []}
    assert checkpoints.freed(store, JOB, entries(store)) == sum(objects(maker).values())
    checkpoints.remove(store, JOB, [second, *entries(store)])
    assert objects(maker) == {}
    assert entries(store) == ()


def test_where_it_is_not_known_what_the_others_need_nothing_goes(store: Bucket, maker: Maker) -> None:
    first, second = chain(maker, 10, 20)
    flip(maker, f"{second.path}/manifest.json", 3)
    before = objects(maker)
    for ask in (
        lambda: checkpoints.freed(store, JOB, [first]),
        lambda: checkpoints.garbage(store, JOB, Retention(last=1)),
    ):
        with pytest.raises(Damaged, match=r"step 20 needs is not known.*gpuctl ckpt rm 20"):
            ask()
    assert objects(maker) == before
    assert checkpoints.remove(store, JOB, [second]) > 0, "the damaged one may go"
    assert checkpoints.remove(store, JOB, [first]) > 0
    assert objects(maker) == {}


def test_the_log_forgets_a_checkpoint_before_its_files_go(store: Bucket, maker: Maker) -> None:
    seen: list[object] = []

    class Watching(Bucket):
        def delete(self, keys: object) -> None:
            seen.append(entries(store))
            super().delete(keys)  # type: ignore[arg-type]

    (entry,) = chain(maker, 10)
    commits.remove(Watching(maker.store.raw, maker.store.url), {entry.path})  # type: ignore[attr-defined]
    assert seen == [()]


def test_removing_while_the_job_commits_loses_none_of_its_checkpoints(store: Bucket, maker: Maker) -> None:
    (first,) = chain(maker, 10)

    class Racing(Bucket):
        raced = False

        def create(self, key: str, data: bytes) -> bool:
            if not self.raced:
                self.raced = True
                maker.save(20, state(20), base=first)
            return super().create(key, data)

    commits.remove(Racing(maker.store.raw, maker.store.url), {first.path})  # type: ignore[attr-defined]
    found = checkpoints.verify(store, JOB, checkpoints.check(store, JOB, entries(store)))
    assert faults(found) == {20: []}


def test_garbage_is_what_no_rule_keeps_and_what_dead_rounds_left(store: Bucket, maker: Maker) -> None:
    made = chain(maker, 10, 20, 30)
    maker.write(25, state(25), 1, attempt=2)
    made.append(maker.save(40, state(40), 2, base=made[-1]))
    maker.write(50, state(50), 2)  # by the running round, which may be about to commit it
    found = checkpoints.garbage(store, JOB, Retention(last=1, every=20))
    assert [entry.step for entry in found.dropped] == [10, 30]
    assert {item.key.partition("/")[0] for item in found.left} == {"25-r1.m-2"}
    before = sum(objects(maker).values())
    assert checkpoints.collect(store, JOB, found) == found.frees == before - sum(objects(maker).values())
    # Of step 10 there are still the parts that never changed, which the others need.
    assert {key.partition("/")[0] for key in objects(maker)} == {"10-r1.m-1", "20-r1.m-1", "40-r2.m-1", "50-r2.m-1"}
    assert f"{made[0].path}/manifest.json" not in objects(maker)
    found_whole = checkpoints.verify(store, JOB, checkpoints.check(store, JOB, entries(store)))
    assert faults(found_whole) == {20: [], 40: []}


def test_without_a_rule_every_checkpoint_stays(store: Bucket, maker: Maker) -> None:
    chain(maker, 10, 20, 30, 40, 50)
    assert checkpoints.garbage(store, JOB, None) == checkpoints.Garbage()


def test_once_the_job_has_ended_its_last_round_is_dead_too_and_stays_so(store: Bucket, maker: Maker) -> None:
    (entry,) = chain(maker, 10, number=3)
    maker.write(20, state(20), 3)
    assert checkpoints.garbage(store, JOB, None).left == ()
    ended = Round(job=JOB, number=3, phase="ended", epoch=1, outcome=Outcome(result="failed", exit_code=1))
    assert jobs.rounds(store, JOB).commit(ended, 0)
    zombie = Commits(maker.store, 3, Retention())
    zombie.begin()
    found = checkpoints.garbage(store, JOB, None)
    assert {item.key.partition("/")[0] for item in found.left} == {"20-r3.m-1"}
    assert checkpoints.collect(store, JOB, found) == found.frees
    assert {key.partition("/")[0] for key in objects(maker)} == {"10-r3.m-1"}
    with pytest.raises(Fenced):
        zombie.commit(replace(entry, step=20, path="20-r3.m-1"), read_manifest(maker.store, entry))


def test_a_commit_during_a_collection_keeps_its_parts(store: Bucket, maker: Maker) -> None:
    """The plan was made before it; what is left over is determined by the log as it is then."""
    first, second = chain(maker, 10, 20)
    maker.write(15, state(15), 1, attempt=2)
    Commits(maker.store, 2, Retention()).begin()
    found = checkpoints.garbage(store, JOB, Retention(last=1))
    assert [entry.step for entry in found.dropped] == [10]
    third = maker.save(30, state(30), 2, base=second)
    checkpoints.collect(store, JOB, found)
    whole = checkpoints.verify(store, JOB, checkpoints.check(store, JOB, entries(store)))
    assert faults(whole) == {20: [], 30: []}
    assert first.path not in {key.partition("/")[0] for key in objects(maker) if "manifest" in key}
    assert third in entries(store)


def test_a_metric_that_no_checkpoint_has_is_refused_with_those_that_there_are(store: Bucket, maker: Maker) -> None:
    maker.save(10, state(10), metrics={"loss": 1.0})
    with pytest.raises(BadInput, match="has a metric 'acc'; they have: loss"):
        checkpoints.garbage(store, JOB, Retention(best="acc"))


def test_a_metric_that_is_no_number_does_not_spoil_the_log(store: Bucket, maker: Maker) -> None:
    maker.save(10, state(10), metrics={"loss": float("nan"), "grad": float("inf"), "acc": 0.5})
    assert [entry.metrics for entry in entries(store)] == [{"acc": 0.5}]


def test_looking_at_a_job_without_checkpoints_writes_nothing(tmp_path: Path, file_url: str) -> None:
    store = open_bucket(file_url)
    assert checkpoints.check(store, JOB, checkpoints.committed(store, JOB)) == []
    assert not (tmp_path / "bucket" / layout.JOBS).exists()
