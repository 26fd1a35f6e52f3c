"""Which run of an ID a node joins."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from gpuctl.bootstrap.rendezvous import runs
from gpuctl.bootstrap.rendezvous.runs import Run, RunRequest, join
from gpuctl.cluster import layout
from gpuctl.cluster.clock import SystemClock
from gpuctl.cluster.errors import BadInput
from gpuctl.cluster.jobs import queue
from gpuctl.cluster.records.codec import encode
from gpuctl.cluster.records.nodes import NodeRecord
from gpuctl.cluster.storage.bucket import Bucket, open_bucket

TWO = RunRequest("exp1", 2, 2, host="here")
THREE = RunRequest("exp1", 3, 3, host="here")


@pytest.fixture
def bucket(bucket_url: str) -> Bucket:
    return open_bucket(bucket_url)


def joined(bucket: Bucket, request: RunRequest = TWO) -> Run:
    return join(bucket, request, SystemClock(), lambda _: None)


def end(run: Run) -> None:
    assert queue.end_as_cancelled(run.store, run.id, "over")


def test_the_first_begins_the_run_and_the_others_find_it_with_its_key(bucket: Bucket) -> None:
    first, second = joined(bucket), joined(bucket)
    assert (second.number, second.spec) == (first.number, first.spec)
    assert len(first.spec.key) == 32
    assert queue.find(second.store, "exp1").nodes_max == 2
    assert joined(bucket, RunRequest("exp2", 2, 2)).spec.key != first.spec.key


def test_of_many_that_come_first_at_once_one_begins_the_run(bucket: Bucket) -> None:
    found: list[Run] = []
    threads = [threading.Thread(target=lambda: found.append(joined(bucket))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {(run.number, run.spec.key) for run in found} == {(1, found[0].spec.key)}
    assert len(found) == 8


def test_an_id_that_is_used_again_is_a_new_run_and_the_last_but_one_is_cleared_away(bucket: Bucket) -> None:
    used = []
    for size in (2, 2, 3):
        used.append(joined(bucket, RunRequest("exp1", size, size)))
        end(used[-1])
    assert [run.number for run in used] == [1, 2, 3]
    assert len({run.spec.key for run in used}) == 3
    assert bucket.list(layout.run("exp1", 1)) == []
    assert bucket.list(layout.run("exp1", 2)) != []
    assert [run.name for run in used] == ["exp1", "exp1 (run 2)", "exp1 (run 3)"]


def test_a_run_whose_nodes_have_all_gone_goes_on_if_it_is_asked_for_as_it_was(bucket: Bucket) -> None:
    run = joined(bucket)
    run.store.put(layout.node("gone"), encode(NodeRecord(node="gone", incarnation="1", beat=9, address="x", port=1)))
    assert joined(bucket).number == run.number


def test_a_run_that_is_in_use_is_not_joined_with_another_size(bucket: Bucket) -> None:
    run = joined(bucket)
    with socket.create_server(("127.0.0.1", 0)) as living:
        port = living.getsockname()[1]
        record = NodeRecord(node="pod-1-aa", incarnation="1", beat=1, address="127.0.0.1", port=port, host="pod-1")
        run.store.put(layout.node(record.node), encode(record))
        with pytest.raises(BadInput, match=r"exp1 is in use with --nodes 2: pod-1 \(127.0.0.1\) is in it"):
            joined(bucket, THREE)
    assert queue.outcome(run.store, run.id) is None


def test_a_run_that_nobody_is_in_any_more_gives_way_to_one_of_another_size(bucket: Bucket) -> None:
    run = joined(bucket)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    record = NodeRecord(node="gone", incarnation="1", beat=1, address="127.0.0.1", port=port)
    run.store.put(layout.node(record.node), encode(record))
    later = joined(bucket, THREE)
    assert (later.number, later.spec.nodes_max) == (2, 3)
    assert queue.outcome(run.store, run.id) is not None


def test_a_run_that_nobody_is_in_gives_way_to_one_with_other_restarts(bucket: Bucket) -> None:
    joined(bucket)
    later = joined(bucket, RunRequest("exp1", 2, 2, max_restarts=3))
    assert (later.number, later.spec.max_restarts) == (2, 3)
    assert queue.find(later.store, "exp1").max_restarts == 3


def test_of_a_run_that_is_in_use_its_own_restarts_count_and_that_is_told(bucket: Bucket) -> None:
    run, said = joined(bucket), list[str]()
    with socket.create_server(("127.0.0.1", 0)) as living:
        port = living.getsockname()[1]
        record = NodeRecord(node="pod-1-aa", incarnation="1", beat=1, address="127.0.0.1", port=port, host="pod-1")
        run.store.put(layout.node(record.node), encode(record))
        found = join(bucket, RunRequest("exp1", 2, 2, max_restarts=3), SystemClock(), said.append)
    assert (found.number, found.spec.max_restarts) == (1, 0)
    assert said[-1] == "--max-restarts 0 counts for exp1, which pod-1 (127.0.0.1) is in"


def test_a_command_is_started_alike_on_all_nodes(bucket: Bucket) -> None:
    """Else they would wait for ranks that do not exist."""
    jax = RunRequest("exp1", 2, 2, launch="--launcher jax --nproc 1")
    run = joined(bucket, jax)
    assert joined(bucket, jax).number == 1
    with socket.create_server(("127.0.0.1", 0)) as living:
        port = living.getsockname()[1]
        record = NodeRecord(node="pod-1-aa", incarnation="1", beat=1, address="127.0.0.1", port=port, host="pod-1")
        run.store.put(layout.node(record.node), encode(record))
        with pytest.raises(BadInput, match=r"in use with --launcher jax --nproc 1: pod-1 .* the same --launcher and"):
            joined(bucket, RunRequest("exp1", 2, 2, launch="--launcher jax --nproc 2"))
        with pytest.raises(BadInput, match="in use with --launcher jax --nproc 1"):
            joined(bucket, TWO)
    run.store.delete([layout.node(record.node)])
    assert joined(bucket, TWO).number == 2, "nobody is left in it"


def test_an_entry_that_cannot_be_read_is_told_with_what_to_delete(bucket: Bucket) -> None:
    joined(bucket)
    (entry,) = [entry for entry in bucket.list(f"{layout.MINGLE}/exp1") if "/runs/" in entry.key]
    bucket.put(entry.key, b"{}")
    with pytest.raises(BadInput, match="use another --id, or delete mingle/exp1/ in the bucket"):
        joined(bucket)


def test_a_run_whose_first_node_died_as_it_began_it_has_its_job_all_the_same(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(runs, "_submit", lambda _: None)
        joined(bucket)
    run = joined(bucket)
    assert run.number == 1
    assert queue.find(run.store, "exp1").nodes_max == 2


@pytest.mark.parametrize(
    "name", ["", "a/b", "../a", "-a", ".", "a b", "a" * 64, "a" * 300, "e\N{COMBINING ACUTE ACCENT}"]
)
def test_what_cannot_be_an_id(name: str) -> None:
    with pytest.raises(BadInput, match="cannot be an ID; use up to 63 letters") as error:
        RunRequest(name, 1, 1)
    assert len(str(error.value)) < 200


@pytest.mark.parametrize("name", ["a", "7", "exp-1.b_2", "A" * 63])
def test_what_can_be_an_id(name: str, tmp_path: Path) -> None:
    assert joined(open_bucket(f"file://{tmp_path}"), RunRequest(name, 1, 1)).id == name
