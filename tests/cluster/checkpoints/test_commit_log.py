"""The log of committed checkpoints: the fence, the order of things, and races."""

from __future__ import annotations

import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from gpuctl import Checkpointer
from gpuctl.cluster.agreement import ledgers
from gpuctl.cluster.checkpoints.commit_log import BaseGone, CommitLog, remove
from gpuctl.cluster.checkpoints.manifest import MANIFEST, Manifest, Part, digest
from gpuctl.cluster.checkpoints.retention import Retention
from gpuctl.cluster.errors import Damaged, Fenced, StoreError, StoreUnavailable
from gpuctl.cluster.records.checkpoints import CheckpointEntry, CheckpointIndex
from gpuctl.cluster.storage.bucket import Bucket, open_bucket
from tests.fakes.faults import FaultyStore, Proxy, Trouble

ALL = Retention(last=None)


def committed(store: Bucket) -> list[tuple[int, int]]:
    log = ledgers.checkpoints_in(store).read().value or CheckpointIndex()
    return [(entry.step, entry.round) for entry in log.entries]


def folders(store: Bucket) -> set[int]:
    """Steps that have a folder."""
    return {int(item.key.split("-")[0]) for item in store.list("") if not item.key.startswith("ledger/")}


def commit(commits: CommitLog, step: int, parts: tuple[str, ...] = (), base: str | None = None, path: str = "") -> None:
    """One whose manifest names ``parts``, of 5 bytes each."""
    path = path or f"{step}-r{commits.round}.0"
    entry = CheckpointEntry(step=step, round=commits.round, path=path, digest="", bytes=1, written=1, world=1)
    named = tuple(Part(key, 5, ("of one block",)) for key in parts)
    commits.commit(entry, Manifest(step=step, parts=named, tensors={}, values={}), base)


def test_a_new_round_shuts_out_the_old_one_at_once(bucket_url: str) -> None:
    store = open_bucket(bucket_url)
    old, new = CommitLog(store, 3, ALL), CommitLog(store, 4, ALL)
    old.begin()
    commit(old, 10)
    assert [entry.step for entry in new.begin()[1]] == [10]
    with pytest.raises(Fenced):
        commit(old, 20)
    commit(new, 15)
    with pytest.raises(Fenced):
        commit(old, 30)
    with pytest.raises(Fenced):
        CommitLog(store, 3, ALL).begin()
    assert committed(store) == [(10, 3), (15, 4)]


def test_outside_of_a_job_each_start_takes_the_next_round(file_url: str) -> None:
    store = open_bucket(file_url)
    assert [CommitLog(store, None, Retention(last=1)).begin()[0] for _ in range(3)] == [1, 2, 3]


def test_a_round_may_begin_twice(file_url: str) -> None:
    store = open_bucket(file_url)
    first, second = CommitLog(store, 5, ALL), CommitLog(store, 5, ALL)
    first.begin()
    second.begin()
    commit(first, 1)
    commit(second, 2)
    assert committed(store) == [(1, 5), (2, 5)]


def test_a_round_that_writes_a_step_anew_deletes_nothing_of_it(file_url: str) -> None:
    store = open_bucket(file_url)
    for attempt in ("first", "second"):
        commits = CommitLog(store, 5, Retention(last=3))
        commits.begin()
        store.put(f"20-r5.{attempt}/part", b"bytes")
        commit(commits, 20, (f"20-r5.{attempt}/part",), path=f"20-r5.{attempt}")
        commits.delete_unneeded()
    assert committed(store) == [(20, 5)]
    assert [item.key for item in store.list("20-r5.second")] == [f"20-r5.second/{MANIFEST}", "20-r5.second/part"]
    assert store.list("20-r5.first") == []


def test_a_part_that_a_later_checkpoint_refers_to_outlives_the_one_that_wrote_it(bucket_url: str) -> None:
    store = open_bucket(bucket_url)
    commits = CommitLog(store, 1, Retention(last=1))
    commits.begin()
    for step in (1, 2, 3):
        store.put(f"{step}-r1.0/own", b"bytes")
    store.put("1-r1.0/shared", b"bytes")
    commit(commits, 1, ("1-r1.0/own", "1-r1.0/shared"))
    commit(commits, 2, ("2-r1.0/own", "1-r1.0/shared"), base="1-r1.0")
    commits.delete_unneeded()
    assert [item.key for item in store.list("1-r1.0")] == ["1-r1.0/shared"]
    later = CommitLog(store, 2, Retention(last=1))
    later.begin()
    commit(later, 3, ("3-r1.0/own",), path="3-r1.0")
    later.delete_unneeded()
    assert {item.key for item in store.list("") if not item.key.startswith("ledger/")} == {
        "3-r1.0/own",
        f"3-r1.0/{MANIFEST}",
    }


def test_a_checkpoint_whose_base_was_removed_meanwhile_is_refused(file_url: str) -> None:
    store = open_bucket(file_url)
    commits = CommitLog(store, 1, ALL)
    commits.begin()
    store.put("1-r1.0/part", b"bytes")
    commit(commits, 1, ("1-r1.0/part",))
    assert remove(store, {"1-r1.0"}) > 0
    assert store.get("1-r1.0/part") is None
    with pytest.raises(BaseGone):
        commit(commits, 2, ("1-r1.0/part",), base="1-r1.0")
    assert committed(store) == []


def harm(store: Bucket, key: str, how: str) -> None:
    if how == "missing":
        store.delete([key])
    else:
        store.put(key, (store.get(key) or b"")[:-1])


@pytest.mark.parametrize("how", ["missing", "cut"])
def test_a_later_round_refers_to_no_part_that_the_bucket_has_lost(bucket_url: str, how: str) -> None:
    store = open_bucket(bucket_url)
    keys = tuple(f"{step}-r1.0/part" for step in (1, 2))
    first = CommitLog(store, 1, ALL)
    first.begin()
    for step, key in enumerate(keys, 1):
        store.put(key, b"bytes")
        commit(first, step, keys[:step])
    harm(store, keys[0], how)
    later = CommitLog(store, 2, ALL)
    later.begin()
    with pytest.raises(BaseGone, match=r"has lost 1 of the parts that 3-r2.0 refers to, such as 1-r1.0/part"):
        commit(later, 3, keys, base="2-r1.0")
    assert committed(store) == [(1, 1), (2, 1)]
    store.put(keys[0], b"bytes")
    commit(later, 3, keys, base="2-r1.0")
    assert committed(store) == [(1, 1), (2, 1), (3, 2)]


def test_it_looks_for_parts_once_and_not_for_those_that_it_has_committed_itself(file_url: str) -> None:
    store = FaultyStore(open_bucket(file_url))
    store.put("1-r1.0/part", b"bytes")
    before = CommitLog(store, 1, ALL)
    before.begin()
    commit(before, 1, ("1-r1.0/part",))
    commits = CommitLog(store, 2, ALL)
    commits.begin()
    asked = []
    for step in range(2, 5):
        store.calls.clear()
        commit(commits, step, ("1-r1.0/part",), base=f"{step - 1}-r{min(step - 1, 2)}.0")
        asked.append(store.calls[: store.calls.index("create")])
    assert asked == [["list", "put"], ["put"], ["put"]]


@pytest.mark.parametrize("how", ["missing", "cut"])
def test_a_checkpoint_whose_manifest_is_lost_keeps_its_own_folder_and_holds_up_nothing_else(
    file_url: str, how: str
) -> None:
    store = open_bucket(file_url)
    commits = CommitLog(store, 1, ALL)
    commits.begin()
    for name in ("1-r1.0/shared", "1-r1.0/own", "100-r1.0/part", "101-r1.0/part"):
        store.put(name, b"bytes")
    commit(commits, 1, ("1-r1.0/shared", "1-r1.0/own"))
    commit(commits, 100, ("1-r1.0/shared", "100-r1.0/part"))
    commit(commits, 101, ("101-r1.0/part",))
    harm(store, f"100-r1.0/{MANIFEST}", how)
    later = CommitLog(store, 2, Retention(last=1, every=100))
    later.begin()
    for step in (102, 103):
        commit(later, step)
        later.delete_unneeded()
    assert committed(store) == [(100, 1), (103, 2)]
    left = {item.key for item in store.list("") if not item.key.startswith("ledger/")}
    assert left - {f"100-r1.0/{MANIFEST}"} == {"100-r1.0/part", f"103-r2.0/{MANIFEST}"}, "the rest only it needed"


def test_what_a_manifest_of_another_version_names_is_not_deleted(file_url: str) -> None:
    store = open_bucket(file_url)
    commits = CommitLog(store, 1, ALL)
    commits.begin()
    store.put("1-r1.0/shared", b"bytes")
    commit(commits, 1, ("1-r1.0/shared",))
    commit(commits, 100, ("1-r1.0/shared",))
    ledger = ledgers.checkpoints_in(store)
    version = ledger.read()
    assert version.value is not None
    first, newest = version.value.entries
    data = msgspec.json.encode(msgspec.json.decode(store.get(f"{newest.path}/{MANIFEST}") or b"") | {"format": 99})
    store.put(f"{newest.path}/{MANIFEST}", data)
    log = replace(version.value, entries=(first, replace(newest, digest=digest(data))))
    assert ledger.commit(log, version.number)
    later = CommitLog(store, 2, Retention(last=1, every=100))
    later.begin()
    commit(later, 101)
    with pytest.raises(Damaged, match="has format 99"):
        later.delete_unneeded()
    assert store.get("1-r1.0/shared") == b"bytes"


def test_where_all_stay_no_manifest_is_read_and_none_is_held(file_url: str) -> None:
    store = FaultyStore(open_bucket(file_url))
    one = CommitLog(store, 1, ALL)
    one.begin()
    tracemalloc.start()
    try:
        for step in range(1, 9):
            commit(one, step, tuple(f"{step}-r1.0/{number:05d}" for number in range(2000)))
            one.delete_unneeded()
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 2000 * 50, "the keys of one are more"
    later = CommitLog(store, 2, ALL)
    later.begin()
    store.calls.clear()
    later.delete_unneeded()
    assert store.calls == ["list"], "for what dead rounds have left: nothing"


@pytest.mark.slow
def test_what_stays_is_known_by_its_keys_and_what_has_gone_is_forgotten(file_url: str) -> None:
    store = FaultyStore(open_bucket(file_url))
    commits = CommitLog(store, 1, Retention(last=2))
    commits.begin()
    tracemalloc.start()
    held = []
    try:
        for step in range(1, 25):
            commit(commits, step, tuple(f"{step}-r1.0/{number:05d}" for number in range(500)))
            commits.delete_unneeded()
            held.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert held[-1] < 1.5 * held[4]
    assert store.calls.count("get") < 24, "each manifest is known from its commit"


def test_the_sweep_is_put_off_like_any_other_deletion(file_url: str) -> None:
    store = FaultyStore(open_bucket(file_url))
    store.put("7-r1.0/part", b"of a round that died")
    commits = CommitLog(store, 2, ALL)
    commits.begin()
    store.calls.clear()
    answers = iter([True, False])
    commits.delete_unneeded(lambda: next(answers))
    assert store.calls == []
    commits.delete_unneeded()
    assert store.get("7-r1.0/part") is None


def test_removing_a_checkpoint_leaves_what_another_one_refers_to(file_url: str) -> None:
    store = open_bucket(file_url)
    commits = CommitLog(store, 1, ALL)
    commits.begin()
    store.put("1-r1.0/shared", b"bytes")
    store.put("1-r1.0/own", b"bytes")
    commit(commits, 1, ("1-r1.0/own", "1-r1.0/shared"))
    commit(commits, 2, ("1-r1.0/shared",), base="1-r1.0")
    remove(store, {"1-r1.0"})
    assert [item.key for item in store.list("1-r1.0")] == ["1-r1.0/shared"]


def test_of_many_that_start_at_once_every_one_gets_a_round_of_its_own_and_only_the_last_commits(file_url: str) -> None:
    store = open_bucket(file_url)
    all_of_them = [CommitLog(store, None, ALL) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        numbers = [number for number, _ in pool.map(CommitLog.begin, all_of_them)]
    assert len(set(numbers)) == 8
    for commits in all_of_them:
        if commits.round == max(numbers):
            commit(commits, 1)
        else:
            with pytest.raises(Fenced):
                commit(commits, 1)
    assert committed(store) == [(1, max(numbers))]


def test_a_checkpoint_deleted_meanwhile_stays_deleted(file_url: str) -> None:
    """``gpuctl ckpt rm`` writes the log as well: a commit that loses to it builds on what it wrote."""
    store = open_bucket(file_url)
    commits = CommitLog(store, 1, ALL)
    commits.begin()
    for step in (1, 2):
        commit(commits, step)
    ledger = ledgers.checkpoints_in(store)
    version = ledger.read()
    assert version.value is not None
    assert ledger.commit(CheckpointIndex(fence=1, entries=version.value.entries[1:]), version.number)
    commit(commits, 3)
    assert committed(store) == [(2, 1), (3, 1)]


def test_going_back_replaces_what_came_after(file_url: str) -> None:
    store = open_bucket(file_url)
    first, second = CommitLog(store, 1, Retention(last=3)), CommitLog(store, 2, Retention(last=3))
    first.begin()
    for step in (10, 20, 30):
        store.put(f"{step}-r1.0/part", b"bytes")
        commit(first, step, (f"{step}-r1.0/part",))
    second.begin()
    commit(second, 20)
    second.delete_unneeded()
    assert committed(store) == [(10, 1), (20, 2)]
    assert [entry.key for entry in store.list("10-r1.0")] == [f"10-r1.0/{MANIFEST}", "10-r1.0/part"]
    assert store.list("20-r1.0") == store.list("30-r1.0") == []


def test_a_commit_whose_answer_is_lost_is_settled_by_reading(file_url: str) -> None:
    store = open_bucket(file_url)
    faulty = FaultyStore(store)
    commits = CommitLog(faulty, 1, ALL)
    commits.begin()
    faulty.trouble("create", "unheard")
    commit(commits, 1)
    faulty.trouble("create", "lost")
    with pytest.raises(StoreUnavailable):
        commit(commits, 2)
    assert committed(store) == [(1, 1)]
    commit(commits, 3)
    assert committed(store) == [(1, 1), (3, 1)]


def test_a_commit_that_landed_unheard_is_known_again_though_its_base_has_gone_with_it(file_url: str) -> None:
    store = open_bucket(file_url)
    faulty = FaultyStore(store)
    commits = CommitLog(faulty, 1, Retention(last=1))
    commits.begin()
    commit(commits, 1)
    faulty.trouble("create", "unheard")
    faulty.trouble("get", "lost")
    with pytest.raises(StoreUnavailable):
        commit(commits, 2, base="1-r1.0")
    assert committed(store) == [(2, 1)]
    commit(commits, 2, base="1-r1.0")
    assert committed(store) == [(2, 1)]


def test_where_the_newest_is_removed_nodes_have_no_copy_of_the_one_before(file_url: str) -> None:
    store = open_bucket(file_url)
    commits = CommitLog(store, 1, ALL)
    commits.begin()
    for step in (1, 2):
        entry = CheckpointEntry(
            step=step, round=1, path=f"{step}-r1.0", digest="", bytes=1, written=1, world=1, nodes=("node-0",)
        )
        commits.commit(entry, Manifest(step=step, parts=(), tensors={}, values={}))
    remove(store, {"2-r1.0"})
    log = ledgers.checkpoints_in(store).read().value
    assert log is not None
    assert [(entry.step, entry.nodes) for entry in log.entries] == [(1, ())]


@pytest.mark.parametrize(("verb", "trouble"), [("create", "lost"), ("create", "unheard"), ("list", "lost")])
def test_a_round_begins_though_the_connection_breaks_as_it_raises_the_fence(
    file_url: str, verb: str, trouble: Trouble
) -> None:
    store = open_bucket(file_url)
    faulty = FaultyStore(store)
    faulty.trouble(verb, trouble)
    assert CommitLog(faulty, 4, ALL).begin() == (4, ())
    with pytest.raises(Fenced):
        CommitLog(store, 3, ALL).begin()


def test_a_metric_of_another_kind_is_kept_as_a_number(file_url: str) -> None:
    store = open_bucket(file_url)
    commits = CommitLog(store, 1, ALL)
    commits.begin()
    metrics = {"loss": np.float32(0.5), "none": float("nan")}
    entry = CheckpointEntry(step=1, round=1, path="1-r1.0", digest="", bytes=1, written=1, world=1, metrics=metrics)  # type: ignore[arg-type]
    commits.commit(entry, Manifest(step=1, parts=(), tensors={}, values={}))
    log = ledgers.checkpoints_in(store).read().value
    assert log is not None
    assert log.entries[0].metrics == {"loss": 0.5}


def test_a_deletion_that_fails_costs_a_line_and_is_done_the_next_time(
    file_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    store = open_bucket(file_url)
    faulty = FaultyStore(store)
    checkpointer = Checkpointer(store=faulty, keep=1)
    checkpointer.save(1, {"count": 1})
    checkpointer.wait()
    faulty.trouble("delete", "lost")
    checkpointer.save(2, {"count": 2})
    checkpointer.wait()
    assert capsys.readouterr().err == "gpuctl: old checkpoints could not be deleted yet: delete never arrived\n"
    assert committed(store) == [(2, 1)]
    assert folders(store) == {1, 2}
    checkpointer.save(3, {"count": 3})
    checkpointer.wait()
    assert folders(store) == {3}


def test_a_store_that_lets_everybody_win_is_refused(s3_url: str, s3_endpoint: str) -> None:
    with (
        Proxy(s3_endpoint, strip=["If-None-Match"]).running() as proxy,
        pytest.raises(StoreError, match="ignores create-only puts"),
    ):
        Checkpointer(s3_url.replace(s3_endpoint, proxy.url)).restore({})


def test_a_bucket_is_probed_once_and_not_by_those_who_find_checkpoints_in_it(s3_url: str, s3_endpoint: str) -> None:
    with Proxy(s3_endpoint).running() as proxy:
        url = s3_url.replace(s3_endpoint, proxy.url)
        checkpointer = Checkpointer(url)
        checkpointer.save(1, {"count": 1})
        checkpointer.wait()
        assert sum("/probe/" in line for line in proxy.seen) == 3
        del proxy.seen[:]
        assert Checkpointer(url).restore({"count": 0}) == 1
        assert not any("/probe/" in line for line in proxy.seen)
