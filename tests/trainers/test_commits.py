"""The log of committed checkpoints: the fence, the order of things, and races."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from gpuctl import Checkpointer
from gpuctl.cluster.bucket import Bucket, open_bucket
from gpuctl.cluster.errors import Fenced, StoreError, StoreUnavailable
from gpuctl.cluster.ledger import Ledger
from gpuctl.cluster.records import CheckpointLog
from gpuctl.trainers.commits import Commits
from tests.cluster.faults import FaultyStore, Proxy


def committed(store: Bucket) -> list[tuple[int, int]]:
    log = Ledger(store, "ledger", CheckpointLog).read().value or CheckpointLog()
    return [(entry.step, entry.round) for entry in log.entries]


def commit(commits: Commits, step: int) -> None:
    commits.commit(step, f"{step}-r{commits.round}", 1, {"index.json": "digest"}, world=1)


def test_a_new_round_shuts_out_the_old_one_at_once(bucket_url: str) -> None:
    store = open_bucket(bucket_url)
    old, new = Commits(store, 3, None), Commits(store, 4, None)
    old.begin()
    commit(old, 10)
    assert [entry.step for entry in new.begin()[1]] == [10]
    with pytest.raises(Fenced):
        commit(old, 20)
    commit(new, 15)
    with pytest.raises(Fenced):
        commit(old, 30)
    with pytest.raises(Fenced):
        Commits(store, 3, None).begin()
    assert committed(store) == [(10, 3), (15, 4)]


def test_outside_of_a_job_each_start_takes_the_next_round(file_url: str) -> None:
    store = open_bucket(file_url)
    assert [Commits(store, None, 1).begin()[0] for _ in range(3)] == [1, 2, 3]


def test_a_round_may_begin_twice(file_url: str) -> None:
    store = open_bucket(file_url)
    first, second = Commits(store, 5, None), Commits(store, 5, None)
    first.begin()
    second.begin()
    commit(first, 1)
    commit(second, 2)
    assert committed(store) == [(1, 5), (2, 5)]


def test_a_round_that_writes_a_step_anew_deletes_nothing_of_it(file_url: str) -> None:
    """It goes into the same folder, and the entry that it replaces must not take the files along."""
    store = open_bucket(file_url)
    for digest in ("first", "second"):
        commits = Commits(store, 5, 3)
        commits.begin()
        store.put("20-r5/index.json", b"{}")
        commits.commit(20, "20-r5", 1, {"index.json": digest}, world=1)
        commits.tidy()
    assert committed(store) == [(20, 5)]
    assert store.get("20-r5/index.json") == b"{}"


def test_of_many_that_start_at_once_every_one_gets_a_round_of_its_own_and_only_the_last_commits(file_url: str) -> None:
    store = open_bucket(file_url)
    all_of_them = [Commits(store, None, None) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        numbers = [number for number, _ in pool.map(Commits.begin, all_of_them)]
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
    commits = Commits(store, 1, None)
    commits.begin()
    for step in (1, 2):
        commit(commits, step)
    ledger = Ledger(store, "ledger", CheckpointLog)
    version = ledger.read()
    assert version.value is not None
    assert ledger.commit(CheckpointLog(fence=1, entries=version.value.entries[1:]), version.number)
    commit(commits, 3)
    assert committed(store) == [(2, 1), (3, 1)]


def test_going_back_replaces_what_came_after(file_url: str) -> None:
    store = open_bucket(file_url)
    first, second = Commits(store, 1, 3), Commits(store, 2, 3)
    first.begin()
    for step in (10, 20, 30):
        commit(first, step)
        store.put(f"{step}-r1/index.json", b"{}")
    second.begin()
    commit(second, 20)
    second.tidy()
    assert committed(store) == [(10, 1), (20, 2)]
    assert [entry.key for entry in store.list("10-r1")] == ["10-r1/index.json"]
    assert store.list("20-r1") == store.list("30-r1") == []


def test_a_commit_whose_answer_is_lost_is_settled_by_reading(file_url: str) -> None:
    store = open_bucket(file_url)
    faulty = FaultyStore(store)
    commits = Commits(faulty, 1, None)
    commits.begin()
    faulty.trouble("create", "unheard")
    commit(commits, 1)
    faulty.trouble("create", "lost")
    with pytest.raises(StoreUnavailable):
        commit(commits, 2)
    assert committed(store) == [(1, 1)]
    commit(commits, 3)
    assert committed(store) == [(1, 1), (3, 1)]


def test_a_deletion_that_fails_costs_a_line_and_is_done_the_next_time(
    file_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    store = open_bucket(file_url)
    faulty = FaultyStore(store)
    checkpointer = Checkpointer(store=faulty, keep=1)
    checkpointer.save(1, {"count": 1})
    faulty.trouble("delete", "lost")
    checkpointer.save(2, {"count": 2})
    assert capsys.readouterr().err == "gpuctl: old checkpoints could not be deleted yet: delete never arrived\n"
    assert committed(store) == [(2, 1)]
    assert store.list("1-r1")
    checkpointer.save(3, {"count": 3})
    assert store.list("1-r1") == store.list("2-r1") == []


def test_a_store_that_lets_everybody_win_is_refused(s3_url: str, s3_endpoint: str) -> None:
    with (
        Proxy(s3_endpoint, strip=["If-None-Match"]).running() as proxy,
        pytest.raises(StoreError, match="ignores create-only puts"),
    ):
        Checkpointer(s3_url.replace(s3_endpoint, proxy.url))
