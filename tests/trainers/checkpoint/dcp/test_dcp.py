"""``torch.distributed.checkpoint`` on a bucket: whole or absent, on any world, and without a pickle in the bucket."""

from __future__ import annotations

import pickle
import signal
from collections import Counter
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import LoadPlan

from gpuctl import BucketReader, BucketWriter, Checkpointer
from gpuctl.cluster import layout
from gpuctl.cluster.checkpoints import listing, verification
from gpuctl.cluster.checkpoints.manifest import read_manifest
from gpuctl.cluster.errors import BadInput, Damaged, Fenced, GpuctlError
from gpuctl.cluster.storage.bucket import open_bucket
from gpuctl.cluster.worker_context import WorkerContext
from tests.fakes.written_cluster import WrittenCluster
from tests.trainers.checkpoint.test_checkpointer import files_of, log_of, named_by_the_log, steps_of
from tests.trainers.checkpoint.test_stored_objects import Bomb, forge, smuggle
from tests.trainers.rank_scripts import planners
from tests.trainers.rank_scripts.checkpointing import kept, same
from tests.trainers.ranks import Ranks, run
from tests.waiting import until

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

# -- worlds and layouts -----------------------------------------------------------------------------------------------


def test_what_four_ranks_saved_alike_two_load_and_one(bucket_url: str) -> None:
    url = at(bucket_url, layout.checkpoints("job"))
    saved = run(4, planners.save, url, 3)[0]
    for found in [*run(2, planners.load, url), *run(1, planners.load, url)]:
        assert found[:2] == (3, 3)
        assert same(found[2], saved)
    store = open_bucket(bucket_url)
    checked = verification.check(store, "job", listing.committed(store, "job"))
    assert [(c.entry.step, c.whole) for c in verification.verify(store, "job", checked)] == [(3, True)]


def at(url: str, folder: str) -> str:
    base, mark, query = url.partition("?")
    return f"{base}/{folder}{mark}{query}"


@pytest.mark.slow
def test_shards_of_three_ranks_are_loaded_by_two_and_by_one_that_has_the_whole(file_url: str) -> None:
    saved = run(3, planners.save, file_url, 3, True)[0]
    for step, epoch, found in [*run(2, planners.load, file_url, None, True), *run(1, planners.load, file_url)]:
        assert (step, epoch) == (3, 3)
        assert same(found, saved)


def test_four_ranks_share_what_they_hold_alike(file_url: str) -> None:
    run(4, planners.save_large, file_url)
    written = written_by(file_url, 4)
    assert all(0.22 <= share <= 0.28 for share in written), written
    state = {
        "embedding": torch.zeros(3 << 20, dtype=torch.int64),
        "layer7": torch.zeros(10_700),
        "own3": torch.zeros(300_000),
    }
    dcp.load({"model": state}, storage_reader=BucketReader(file_url))
    assert torch.equal(state["embedding"], torch.arange(3 << 20))
    assert bool(state["layer7"].eq(7).all())
    assert bool(state["own3"].eq(1).all())


def test_two_ranks_that_hold_the_same_shard_share_it(file_url: str) -> None:
    run(4, planners.save_in_halves, file_url)
    written = written_by(file_url, 4)
    assert all(0.24 <= share <= 0.26 for share in written), written


def written_by(url: str, world: int) -> list[float]:
    """The share of the bytes that each rank has written."""
    store = open_bucket(url)
    parts = read_manifest(store, log_of(url).entries[-1]).parts
    total = sum(part.size for part in parts)
    return [sum(part.size for part in parts if f"/{rank:05d}-" in part.key) / total for rank in range(world)]


def test_a_save_in_the_background_holds_what_was_there_when_it_was_asked_for(file_url: str) -> None:
    assert run(2, planners.save_in_the_background, file_url) == [[1], [1]]
    state = {"weights": torch.zeros(1 << 20), "epoch": 0}
    dcp.load(state, storage_reader=BucketReader(file_url))
    assert bool(state["weights"].eq(1).all())  # type: ignore[attr-defined]
    assert state["epoch"] == 1


# -- whole or absent --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_killed_before_any_write_of_a_save_a_whole_checkpoint_is_found(file_url: str, tmp_path: Path) -> None:
    """Kill -9 of rank 0 and of another, before each of their writes: parts, values, manifest, commit, deletion of the
    old one."""
    killed: dict[int, int] = {}
    found_steps = []
    for rank in (1, 0):
        for nth in count(1):
            url, mark = f"{file_url}-{rank}-{nth}", tmp_path / f"{rank}-{nth}"
            with Ranks(2, planners.save_and_stop, url, rank, nth, signal.SIGKILL, str(mark)) as ranks:
                ended = ranks.wait(first=rank)
            if not mark.exists():
                assert [end.code for end in ended] == [0, 0], ended
                break
            killed[rank] = nth
            assert ended[rank].code == -signal.SIGKILL
            (step,) = steps_of(url)
            state = {"weights": torch.zeros(1 << 20), "step": 0}
            dcp.load(state, storage_reader=BucketReader(url))
            assert state["step"] == step
            assert bool(state["weights"].eq(step).all()), f"rank {rank}, write {nth}"  # type: ignore[attr-defined]
            found_steps.append(step)
            dcp.save(state, storage_writer=BucketWriter(url, step=3, keep=1))
            assert steps_of(url) == [3]
            assert files_of(url) == named_by_the_log(url), "what the killed one left behind is swept"
    # Of rank 1 its part; of rank 0 its own, the values, the manifest, the commit, and the old checkpoint's four files.
    assert killed == {1: 1, 0: 4 + 4}
    assert found_steps == [1] * (1 + 4) + [2] * 4


def test_a_sleeper_of_an_older_round_commits_nothing_over_a_newer_one(file_url: str, tmp_path: Path) -> None:
    """Frozen just before its commit; then another one saves, which takes a newer round."""
    mark = tmp_path / "asleep"
    with Ranks(1, planners.save_and_stop, file_url, 0, 4, signal.SIGSTOP, str(mark)) as sleeper:
        until(mark.exists, f"{mark}")
        run(1, planners.save, file_url, 3)
        log = log_of(file_url)
        sleeper.send(0, signal.SIGCONT)
        (end,) = sleeper.wait()
    assert end.code == 1
    assert log_of(file_url) == log
    assert [entry.step for entry in log.entries] == [1, 3]


def test_in_a_job_the_place_and_the_round_are_the_jobs_own(bucket_url: str, tmp_path: Path) -> None:
    def context(number: int) -> dict[str, str]:
        return WorkerContext("demo", bucket_url, "digits-3", number, "node-0", tmp_path, tmp_path, tmp_path).env()

    assert run(2, planners.refused, 7, env=context(7)) == ["", ""]
    (entry,) = listing.committed(open_bucket(bucket_url), "digits-3")
    assert (entry.step, entry.round, entry.world) == (7, 7, 2)
    assert run(2, planners.refused, 8, env=context(8)) == ["", ""]
    for said in run(2, planners.refused, 9, env=context(7)):
        assert said.startswith("Fenced: round 8 of this job has begun, so round 7 may not write checkpoints any more")
    assert [entry.step for entry in listing.committed(open_bucket(bucket_url), "digits-3")] == [7, 8]


def test_a_round_that_has_looked_for_a_checkpoint_lets_no_older_one_commit(
    file_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def job(number: int) -> None:
        context = WorkerContext("demo", file_url, "digits-3", number, "node-0", tmp_path, tmp_path, tmp_path)
        for name, value in context.env().items():
            monkeypatch.setenv(name, value)

    job(3)
    dcp.save({"weights": torch.ones(3)}, storage_writer=BucketWriter(step=1))
    job(4)
    assert BucketReader().steps() == [1]
    job(3)
    (failure,) = failures_of(lambda: dcp.save({"weights": torch.ones(3)}, storage_writer=BucketWriter(step=2)))
    assert isinstance(failure, Fenced)


def failures_of(call: Any) -> list[BaseException]:
    with pytest.raises(CheckpointException) as raised:
        call()
    return [failure for failure, _ in raised.value.failures.values()]


def said_of(raised: pytest.ExceptionInfo[BaseException], capsys: pytest.CaptureFixture[str]) -> str:
    """Up to torch 2.11, ``dcp.load`` keeps to itself why there is no manifest: a line says it."""
    return str(raised.value) if torch.__version__ >= "2.12" else capsys.readouterr().err


@pytest.mark.parametrize("harm", ["flipped", "cut short", "missing"])
def test_a_damaged_part_is_named_and_the_checkpoint_before_can_be_chosen(bucket_url: str, harm: str) -> None:
    for step in (1, 2):
        state = {"weights": torch.full((1 << 20,), float(step))}
        dcp.save(state, storage_writer=BucketWriter(bucket_url, step=step))
    store = open_bucket(bucket_url)
    key = next(key for key in files_of(bucket_url) if key.startswith("2-") and "/00000-" in key)
    data = store.get(key) or b""
    if harm == "missing":
        store.delete([key])
    else:
        store.put(key, data[:-1] if harm == "cut short" else bytes([data[0] ^ 1]) + data[1:])
    (failure,) = failures_of(lambda: dcp.load(state, storage_reader=BucketReader(bucket_url)))
    assert isinstance(failure, Damaged)
    assert str(failure) in (f"{key} is not what was written", f"{key} is cut short", f"{key} is missing")
    dcp.load(state, storage_reader=BucketReader(bucket_url, step=1))
    assert bool(state["weights"].eq(1).all())


def test_saving_a_step_again_overwrites_nothing_of_it(file_url: str) -> None:
    writer = BucketWriter(file_url, step=1)
    keys: set[str] = set()
    for _ in range(2):
        dcp.save({"weights": torch.ones(3)}, storage_writer=writer)
        assert not keys & named_by_the_log(file_url)
        keys = named_by_the_log(file_url)
    assert files_of(file_url) == keys, "the one that was replaced is gone"


def test_a_damaged_manifest_is_named(file_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    state = {"weights": torch.ones(3)}
    dcp.save(state, storage_writer=BucketWriter(file_url, step=1))
    key = f"{log_of(file_url).entries[0].path}/manifest.json"
    open_bucket(file_url).put(key, b"{}")
    with pytest.raises(CheckpointException) as raised:
        dcp.load(state, storage_reader=BucketReader(file_url))
    assert f"{key} is not what was written" in said_of(raised, capsys)


# -- the rest of gpuctl -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_line_lists_verifies_and_pulls_what_dcp_saved(tmp_path: Path, file_url: str) -> None:
    cluster = WrittenCluster(tmp_path, file_url)
    job = cluster.submit().job
    saved = run(2, planners.save, f"{file_url}/{layout.checkpoints(job)}", 3)[0]
    assert [cluster.run("ckpt", "ls").stdout.splitlines()[1].split()[n] for n in (0, -2)] == ["3", "whole"]
    verified = cluster.run("ckpt", "verify")
    assert (verified.returncode, "whole" in verified.stdout) == (0, True), verified
    pulled = cluster.run("ckpt", "pull", "last", str(tmp_path / "out"), "--format", "torch")
    assert pulled.returncode == 0, pulled
    assert torch.load(tmp_path / "out" / "epoch.pt", weights_only=True) == 3
    for item in ("model", "optimizer"):
        assert same(torch.load(tmp_path / "out" / f"{item}.pt", weights_only=True), saved[item])


def test_checkpointer_restores_what_dcp_saved(file_url: str) -> None:
    saved = run(3, planners.save, file_url, 5, True)[0]
    model, optimizer = planners.learner(99)
    state = {"model": model, "optimizer": optimizer, "epoch": 0}
    assert Checkpointer(file_url).restore(state) == 5
    assert state["epoch"] == 5
    assert same(planners.facts(model, optimizer), saved)


def test_dcp_loads_what_checkpointer_saved(file_url: str) -> None:
    model, optimizer = planners.learner(1)
    kept(
        Checkpointer(file_url),
        4,
        {"model": model, "optimizer": optimizer, "epoch": 4, "seen": {"labels": Counter(a=2)}},
    )
    assert planners.load(file_url)[:2] == (4, 4)
    assert same(planners.load(file_url)[2], planners.facts(model, optimizer))
    state: dict[str, Any] = {"seen": {"labels": Counter(a=0)}}
    dcp.load(state, storage_reader=BucketReader(file_url))
    assert state == {"seen": {"labels": Counter(a=2)}}


# -- values -----------------------------------------------------------------------------------------------------------


VALUES: dict[str, Any] = {
    "none": None,
    "number": 2**70,
    "text": "ü",
    "raw": b"\0\xff",
    "pair": (1, [2.5, float("inf")], {"a": None}),
    "tensors": (torch.arange(3), torch.zeros(0, 2)),
    "list": [1, 2],
    "mixed": [torch.ones(2), {"deep": [3]}, "end"],
    "counts": Counter(cat=2),
}


@pytest.mark.parametrize("flatten", [True, False], ids=["flattened", "as they are"])
def test_values_come_back_as_they_were(file_url: str, flatten: bool) -> None:
    # What DCP flattens of sharded tensors it copies: the values that it loads then go into the copy.
    saving = DefaultSavePlanner(flatten_state_dict=flatten, flatten_sharded_tensors=flatten)
    loading = DefaultLoadPlanner(flatten_state_dict=flatten, flatten_sharded_tensors=flatten)
    dcp.save({"state": VALUES, "epoch": 7}, storage_writer=BucketWriter(file_url, step=1), planner=saving)
    blank = {**dict.fromkeys(VALUES), "mixed": [torch.zeros(2), {"deep": [0]}, ""], "counts": Counter(cat=0)}
    found: dict[str, Any] = {"state": blank, "epoch": 0}
    dcp.load(found, storage_reader=BucketReader(file_url), planner=loading)
    assert found["epoch"] == 7
    assert found["state"].keys() == VALUES.keys()
    for name, value in VALUES.items():
        assert same(found["state"][name], value), name


def test_an_array_within_a_value_comes_back(file_url: str) -> None:
    state: dict[str, Any] = {"generator": ("MT19937", np.arange(5, dtype=np.uint32), 3)}
    dcp.save(state, storage_writer=BucketWriter(file_url, step=1))
    found: dict[str, Any] = {"generator": None}
    dcp.load(found, storage_reader=BucketReader(file_url))
    kind, array, number = found["generator"]
    assert (kind, array.dtype, array.tolist(), number) == ("MT19937", np.uint32, [0, 1, 2, 3, 4], 3)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (object(), r"'seen\.sampler' of the state to save is a object, which a checkpoint cannot hold"),
        ((1, {2, 3}), r"'seen\.sampler\.1' of the state to save is a set"),
    ],
)
def test_a_value_that_json_cannot_hold_is_refused_by_name_and_nothing_is_committed(
    file_url: str, value: object, said: str
) -> None:
    state = {"seen": {"sampler": value}, "weights": torch.ones(3)}
    (failure,) = failures_of(lambda: dcp.save(state, storage_writer=BucketWriter(file_url, step=1)))
    assert isinstance(failure, BadInput)
    with pytest.raises(BadInput, match=said):
        raise failure
    assert steps_of(file_url) == []


def test_a_tensor_that_is_not_dense_is_refused_by_name(file_url: str) -> None:
    state = {"model": {"sparse": torch.eye(3).to_sparse()}}
    (failure,) = failures_of(lambda: dcp.save(state, storage_writer=BucketWriter(file_url, step=1)))
    assert "'model.sparse' of the state to save is torch.sparse_coo" in str(failure)


@pytest.mark.parametrize("which", ["nothing", "a value", "a tensor"])
def test_nothing_that_lies_in_the_bucket_is_unpickled(file_url: str, tmp_path: Path, which: str) -> None:
    """Its digests are right: whoever forged it may write to the bucket."""
    state = {"weights": torch.ones(3), "epoch": 1, "pair": (1, "a")}
    dcp.save(state, storage_writer=BucketWriter(file_url, step=1))
    store, bomb = open_bucket(file_url), pickle.dumps(Bomb(tmp_path / "boom"))

    def change(manifest: dict[str, Any]) -> None:
        if which == "a value":
            manifest["values"] = {name: smuggle(store, manifest, bomb) for name in manifest["values"]}
        if which == "a tensor":
            manifest["tensors"]["weights"]["chunks"][0]["pieces"] = smuggle(store, manifest, bomb)

    forge(store, change)
    ((said, events),) = run(1, planners.watched_load, file_url)
    assert events == []
    assert not (tmp_path / "boom").exists()
    assert {
        "nothing": said == "",
        "a value": "has an invalid record of its state" in said,
        "a tensor": "does not have all bytes of 'weights'" in said,
    }[which], said


# -- planners and readers ---------------------------------------------------------------------------------------------


def test_plans_that_dcp_has_cached_save_what_there_is_now(file_url: str) -> None:
    run(2, planners.save_by_cached_plans, file_url)
    for step in (1, 2, 3):
        state: dict[str, Any] = {"large": torch.zeros(1 << 20), "step": 0}
        state |= {"new": torch.zeros(5)} if step == 3 else {}
        dcp.load(state, storage_reader=BucketReader(file_url, step=step))
        assert state["step"] == step
        assert bool(state["large"].eq(step).all())
    assert files_of(file_url) == named_by_the_log(file_url)


def test_a_target_of_another_dtype_or_layout_gets_the_same_numbers(file_url: str) -> None:
    numbers = torch.arange(12.0).reshape(3, 4)
    dcp.save({"a": numbers, "b": numbers, "c": numbers}, storage_writer=BucketWriter(file_url, step=1))
    state = {
        "a": torch.zeros(3, 4, dtype=torch.bfloat16),
        "b": torch.zeros(4, 3).t(),
        "c": torch.zeros(3, 8, dtype=torch.float64)[:, ::2],
    }
    dcp.load(state, storage_reader=BucketReader(file_url))
    for name, dtype in (("a", torch.bfloat16), ("b", torch.float32), ("c", torch.float64)):
        assert same(state[name], numbers.to(dtype)), name


@pytest.mark.slow
def test_a_save_and_a_load_hold_no_more_than_they_say(file_url: str) -> None:
    ((saving, loading),) = run(1, planners.growth, file_url)
    assert saving < 64, "ten parts of 4 MiB, and what the machinery needs"
    assert loading < 64 + 20, "what may be on its way, and what the machinery needs"


def test_a_step_is_needed_to_save_and_can_be_chosen_to_load(
    file_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = {"weights": torch.ones(3)}
    (failure,) = failures_of(lambda: dcp.save(state, storage_writer=BucketWriter(file_url)))
    assert "there is no step to save this as" in str(failure)
    writer = BucketWriter(str(tmp_path / "bucket"), step=1, keep=2)
    dcp.save(state, storage_writer=writer)
    for step in ("5", "7"):
        dcp.save(state, storage_writer=writer, checkpoint_id=step)
    reader = BucketReader(file_url)
    assert reader.steps() == [5, 7]
    dcp.load(state, storage_reader=reader, checkpoint_id="5")
    assert reader.loaded == 5
    with pytest.raises(CheckpointException) as raised:
        dcp.load(state, storage_reader=reader, checkpoint_id="6")
    assert "no checkpoint of step 6 found; available steps: 5, 7" in said_of(raised, capsys)
    with pytest.raises(BadInput, match="'last' is not a number of optimizer steps"):
        dcp.save(state, storage_writer=writer, checkpoint_id="last")
    with pytest.raises(BadInput, match="'-1' is not a number"):
        BucketWriter(file_url, step=-1)


def test_outside_of_a_job_a_place_must_be_given() -> None:
    with pytest.raises(BadInput, match="outside a gpuctl job there is no default checkpoint folder; give the URL"):
        BucketReader().steps()


def test_ranks_that_have_found_different_checkpoints_are_told(file_url: str) -> None:
    reader = BucketReader(file_url)
    with pytest.raises(GpuctlError, match="the newest checkpoint changed while the ranks looked for it; load again"):
        reader.prepare_global_plan([LoadPlan([], storage_data="1-r1.a-0"), LoadPlan([], storage_data="2-r1.b-0")])
