"""What deleting checkpoints frees, and what is garbage."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from gpuctl.cluster.agreement import ledgers
from gpuctl.cluster.checkpoints import commit_log, deletion, verification
from gpuctl.cluster.checkpoints.commit_log import CommitLog
from gpuctl.cluster.checkpoints.manifest import read_manifest
from gpuctl.cluster.checkpoints.retention import Retention
from gpuctl.cluster.errors import BadInput, Damaged, Fenced
from gpuctl.cluster.records.rounds import JobOutcome, Round
from gpuctl.cluster.storage.bucket import Bucket
from tests.cluster.checkpoints.chains import JOB, chain, entries, faults, flip, objects, state
from tests.fakes.checkpoints import Maker


def test_removing_tells_beforehand_what_it_frees_and_keeps_what_others_need(store: Bucket, maker: Maker) -> None:
    first, second, _ = chain(maker, 10, 20, 30)
    before = objects(maker)
    told = deletion.freed(store, JOB, [first])
    assert deletion.remove(store, JOB, [first]) == told == sum(before.values()) - sum(objects(maker).values())
    assert told < first.bytes / 2, "most of it is needed by the others"
    left = verification.verify(store, JOB, verification.check(store, JOB, entries(store)))
    assert faults(left) == {20: [], 30: []}
    assert deletion.freed(store, JOB, entries(store)) == sum(objects(maker).values())
    deletion.remove(store, JOB, [second, *entries(store)])
    assert objects(maker) == {}
    assert entries(store) == ()


def test_where_it_is_not_known_what_the_others_need_nothing_goes(store: Bucket, maker: Maker) -> None:
    first, second = chain(maker, 10, 20)
    flip(maker, f"{second.path}/manifest.json", 3)
    before = objects(maker)
    for ask in (
        lambda: deletion.freed(store, JOB, [first]),
        lambda: deletion.garbage(store, JOB, Retention(last=1)),
    ):
        with pytest.raises(Damaged, match=r"step 20 needs.*gpuctl ckpt rm 20"):
            ask()
    assert objects(maker) == before
    assert deletion.remove(store, JOB, [second]) > 0, "the damaged one may go"
    assert deletion.remove(store, JOB, [first]) > 0
    assert objects(maker) == {}


def test_the_log_forgets_a_checkpoint_before_its_files_go(store: Bucket, maker: Maker) -> None:
    seen: list[object] = []

    class Watching(Bucket):
        def delete(self, keys: object) -> None:
            seen.append(entries(store))
            super().delete(keys)  # type: ignore[arg-type]

    (entry,) = chain(maker, 10)
    commit_log.remove(Watching(maker.store.raw, maker.store.url), {entry.path})  # type: ignore[attr-defined]
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

    commit_log.remove(Racing(maker.store.raw, maker.store.url), {first.path})  # type: ignore[attr-defined]
    found = verification.verify(store, JOB, verification.check(store, JOB, entries(store)))
    assert faults(found) == {20: []}


def test_garbage_is_what_no_rule_keeps_and_what_dead_rounds_left(store: Bucket, maker: Maker) -> None:
    made = chain(maker, 10, 20, 30)
    maker.write(25, state(25), 1, attempt=2)
    made.append(maker.save(40, state(40), 2, base=made[-1]))
    maker.write(50, state(50), 2)  # by the running round, which may be about to commit it
    found = deletion.garbage(store, JOB, Retention(last=1, every=20))
    assert [entry.step for entry in found.dropped] == [10, 30]
    assert {item.key.partition("/")[0] for item in found.left} == {"25-r1.m-2"}
    before = sum(objects(maker).values())
    assert deletion.collect(store, JOB, found) == found.frees == before - sum(objects(maker).values())
    # Of step 10 there are still the parts that never changed, which the others need.
    assert {key.partition("/")[0] for key in objects(maker)} == {"10-r1.m-1", "20-r1.m-1", "40-r2.m-1", "50-r2.m-1"}
    assert f"{made[0].path}/manifest.json" not in objects(maker)
    found_whole = verification.verify(store, JOB, verification.check(store, JOB, entries(store)))
    assert faults(found_whole) == {20: [], 40: []}


def test_without_a_rule_every_checkpoint_stays(store: Bucket, maker: Maker) -> None:
    chain(maker, 10, 20, 30, 40, 50)
    assert deletion.garbage(store, JOB, None) == deletion.Garbage()


def test_once_the_job_has_ended_its_last_round_is_dead_too_and_stays_so(store: Bucket, maker: Maker) -> None:
    (entry,) = chain(maker, 10, number=3)
    maker.write(20, state(20), 3)
    assert deletion.garbage(store, JOB, None).left == ()
    ended = Round(job=JOB, number=3, phase="ended", epoch=1, outcome=JobOutcome(result="failed", exit_code=1))
    assert ledgers.rounds(store, JOB).commit(ended, 0)
    zombie = CommitLog(maker.store, 3, Retention())
    zombie.begin()
    found = deletion.garbage(store, JOB, None)
    assert {item.key.partition("/")[0] for item in found.left} == {"20-r3.m-1"}
    assert deletion.collect(store, JOB, found) == found.frees
    assert {key.partition("/")[0] for key in objects(maker)} == {"10-r3.m-1"}
    with pytest.raises(Fenced):
        zombie.commit(replace(entry, step=20, path="20-r3.m-1"), read_manifest(maker.store, entry))


def test_a_commit_during_a_collection_keeps_its_parts(store: Bucket, maker: Maker) -> None:
    """The plan was made before it; what is left over is determined by the log as it is then."""
    first, second = chain(maker, 10, 20)
    maker.write(15, state(15), 1, attempt=2)
    CommitLog(maker.store, 2, Retention()).begin()
    found = deletion.garbage(store, JOB, Retention(last=1))
    assert [entry.step for entry in found.dropped] == [10]
    third = maker.save(30, state(30), 2, base=second)
    deletion.collect(store, JOB, found)
    whole = verification.verify(store, JOB, verification.check(store, JOB, entries(store)))
    assert faults(whole) == {20: [], 30: []}
    assert first.path not in {key.partition("/")[0] for key in objects(maker) if "manifest" in key}
    assert third in entries(store)


def test_a_metric_that_no_checkpoint_has_is_refused_with_those_that_there_are(store: Bucket, maker: Maker) -> None:
    maker.save(10, state(10), metrics={"loss": 1.0})
    with pytest.raises(BadInput, match="has a metric 'acc'; they have: loss"):
        deletion.garbage(store, JOB, Retention(best="acc"))


def test_a_metric_that_is_no_number_does_not_spoil_the_log(store: Bucket, maker: Maker) -> None:
    maker.save(10, state(10), metrics={"loss": float("nan"), "grad": float("inf"), "acc": 0.5})
    assert [entry.metrics for entry in entries(store)] == [{"acc": 0.5}]
