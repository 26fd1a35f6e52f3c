"""Checkpoints by real worker processes: whole or absent, on any world, and never by a leftover."""

from __future__ import annotations

import json
import re
import signal
import threading
import time
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpuctl import Checkpointer
from gpuctl.cluster.agreement import ledgers
from gpuctl.cluster.checkpoints import listing
from gpuctl.cluster.checkpoints.manifest import Piece, manifest_key, read_manifest
from gpuctl.cluster.errors import BadInput, Damaged, Fenced
from gpuctl.cluster.records.checkpoints import CheckpointIndex
from gpuctl.cluster.storage.bucket import Bucket, open_bucket
from gpuctl.cluster.worker_context import DEADLINE, WorkerContext
from tests.trainers.rank_scripts import checkpointing
from tests.trainers.rank_scripts.checkpointing import kept, same
from tests.trainers.ranks import Ranks, run
from tests.waiting import PATIENCE_S, until


def log_of(url: str) -> CheckpointIndex:
    return ledgers.checkpoints_in(open_bucket(url)).read().value or CheckpointIndex()


def steps_of(url: str) -> list[int]:
    return [entry.step for entry in log_of(url).entries]


def files_of(url: str) -> set[str]:
    """The files in the bucket besides the ledger."""
    keys = {entry.key for entry in open_bucket(url).list("")}
    return {key for key in keys if not key.startswith("ledger/")}


def named_by_the_log(url: str) -> set[str]:
    store = open_bucket(url)
    entries = log_of(url).entries
    return {key for entry in entries for key in read_manifest(store, entry).keys() | {manifest_key(entry)}}


@pytest.mark.slow
def test_what_four_ranks_saved_three_restore_and_then_one(bucket_url: str) -> None:
    saved = run(4, checkpointing.save_some, bucket_url, [2, 3])
    expected, _ = saved[0]
    three = run(3, checkpointing.restore_one, bucket_url)
    for rank, (step, found, drawn) in enumerate(three):
        assert step == 3
        assert same(found, expected), f"rank {rank}"
        assert drawn == saved[rank][1], "each rank's random number generators go on"
    ((expected, drawn),) = run(1, checkpointing.save_some, bucket_url, [5])
    four = run(4, checkpointing.restore_one, bucket_url)
    assert [step for step, _, _ in four] == [5] * 4
    assert all(same(found, expected) for _, found, _ in four)
    assert four[0][2] == drawn
    assert len({drawn for _, _, drawn in four}) == 4, "a rank that was not there keeps its own generators"


@pytest.mark.slow
def test_shards_of_three_ranks_are_restored_by_two_and_by_one_that_has_the_whole(file_url: str) -> None:
    for world, steps in ((3, 2), (2, 4)):
        saved = run(world, checkpointing.save_sharded, file_url)
        ((step, found, counted),) = run(1, checkpointing.restore_whole, file_url)
        assert (step, counted) == (steps, {steps})
        assert same(found, saved[0])


def test_the_work_is_shared_and_buffers_are_those_of_rank_0(file_url: str) -> None:
    (expected, _), (other, _), _ = run(3, checkpointing.save_some, file_url, [1])
    assert not same(expected["model"]["running"], other["model"]["running"])
    ((_, found, _),) = run(1, checkpointing.restore_one, file_url)
    assert same(found["model"]["running"], expected["model"]["running"])
    (entry,) = log_of(file_url).entries
    store = open_bucket(file_url)
    parts = read_manifest(store, entry).parts
    written = {rank: sum(p.size for p in parts if f"/{rank:05d}-" in p.key) for rank in range(3)}
    random = sum(piece.size for piece in read_manifest(store, entry).values["@rng.1"])
    assert 0.4 < (written[1] - random) / (written[2] - random) < 2.5, "cut at 64 bytes, and this model is tiny"
    assert (entry.step, entry.world, entry.path) == (1, 3, entry.path)
    sizes = {item.key: item.size for item in store.list(entry.path)}
    assert entry.bytes == entry.written == sum(sizes.values()) - sizes[manifest_key(entry)]


def test_what_is_no_tensor_is_json_and_tensors_are_raw(file_url: str) -> None:
    ((state, _),) = run(1, checkpointing.save_some, file_url, [1])
    store = open_bucket(file_url)
    (entry,) = log_of(file_url).entries
    manifest = read_manifest(store, entry)

    def read(pieces: tuple[Piece, ...]) -> bytes:
        parts = {piece.part: store.get(manifest.parts[piece.part].key) or b"" for piece in pieces}
        return b"".join(parts[piece.part][piece.at : piece.at + piece.size] for piece in pieces)

    for pieces in manifest.values.values():
        json.loads(read(pieces))
    raw = read(manifest.tensors["model.strided"].chunks[0].pieces)
    assert raw == state["model"]["strided"].contiguous().numpy().tobytes()


def test_tied_weights_are_written_once(file_url: str) -> None:
    run(1, checkpointing.save_some, file_url, [1])
    manifest = read_manifest(open_bucket(file_url), log_of(file_url).entries[0])
    assert manifest.tensors["model.tied.weight"] == manifest.tensors["model.head.weight"]


@pytest.mark.slow
@pytest.mark.parametrize("harm", ["changed", "missing"])
def test_a_damaged_checkpoint_gives_way_to_the_one_before_and_is_replaced(bucket_url: str, harm: str) -> None:
    (expected, _), _ = run(2, checkpointing.save_some, bucket_url, [1])
    run(2, checkpointing.save_some, bucket_url, [2])
    store = open_bucket(bucket_url)
    key = next(key for key in files_of(bucket_url) if key.startswith("2-") and "/00001-" in key)
    if harm == "changed":
        data = bytearray(store.get(key) or b"")
        data[len(data) // 2] ^= 1
        store.put(key, bytes(data))
    else:
        store.delete([key])
    reason = {"changed": "is not what was written", "missing": "is missing"}[harm]
    with Ranks(2, checkpointing.restore_one, bucket_url) as ranks:
        ended = ranks.wait()
    assert [end.said for end in ended] == [f"gpuctl: checkpoint of step 2 is damaged: {key} {reason}\n", ""]
    for end in ended:
        step, found, _ = end.value
        assert step == 1
        assert same(found, expected)

    run(2, checkpointing.save_some, bucket_url, [2])
    assert run(1, checkpointing.restore_one, bucket_url)[0][0] == 2
    assert files_of(bucket_url) == named_by_the_log(bucket_url)


@pytest.mark.slow
def test_no_whole_checkpoint_at_all_is_an_error_and_no_fresh_start(file_url: str) -> None:
    run(1, checkpointing.save_some, file_url, [1, 2])
    store = open_bucket(file_url)
    store.delete([key for key in files_of(file_url) if key.endswith("manifest.json")])
    with pytest.raises(Damaged, match="none of the 2 checkpoints is intact"):
        Checkpointer(file_url).restore(checkpointing.training())


@pytest.mark.parametrize(
    ("width", "deeper", "said"),
    [
        (7, False, r"model\.conv\.weight is float32\[6, 1, 3, 3\] in the checkpoint and float32\[7, 1, 3, 3\] here"),
        (6, True, r"model\.deeper\.weight is absent in the checkpoint and float32\[2, 2\] here"),
    ],
)
def test_a_checkpoint_of_another_model_names_the_first_tensor_that_differs_and_loads_nothing(
    file_url: str, width: int, deeper: bool, said: str
) -> None:
    run(2, checkpointing.save_some, file_url, [1])
    for text, untouched in [
        *run(2, checkpointing.refused, file_url, width, deeper),
        *run(1, checkpointing.refused, file_url, width, deeper),
    ]:
        assert text.startswith(f"BadInput: checkpoint {log_of(file_url).entries[0].path} belongs to another model: ")
        assert untouched
        assert re.search(said, text)


def test_a_state_that_cannot_be_kept_is_refused_by_name(file_url: str) -> None:
    with pytest.raises(BadInput, match=r"'seen\.sampler' of the state to save is a object"):
        Checkpointer(file_url).save(1, {"seen": {"sampler": object()}})
    assert files_of(file_url) == set()


def test_a_part_of_the_state_can_be_restored_alone_and_an_optimizer_without_its_model(file_url: str) -> None:
    state = checkpointing.training()
    checkpointing.train(state, 2)
    kept(Checkpointer(file_url), 2, state)
    part = {"model": checkpointing.training(seed=1)["model"], "average": None}
    assert Checkpointer(file_url).restore(part) == 2
    assert same(dict(part["model"].state_dict()), dict(state["model"].state_dict()))
    assert same(part["average"], state["average"])
    with pytest.raises(BadInput, match="has no 'teacher', only 'model', 'optimizer', 'scheduler', 'seen', 'average'"):
        Checkpointer(file_url).restore({"teacher": None})

    alone = f"{file_url}-alone"
    kept(Checkpointer(alone), 1, {"optimizer": state["optimizer"]})
    other = checkpointing.training()
    Checkpointer(alone).restore({"optimizer": other["optimizer"]})
    assert same(other["optimizer"].state_dict(), state["optimizer"].state_dict())


def test_of_two_checkpointers_in_one_process_each_hears_of_its_own_saves(file_url: str) -> None:
    for said in run(2, checkpointing.save_where_refused_and_here, file_url):
        assert said.startswith("the checkpoint of step 1 was not written: rank 0: the bucket refuses")
    assert steps_of(file_url) == [2]


def test_the_last_ones_are_kept_and_the_files_of_others_go(bucket_url: str) -> None:
    run(2, checkpointing.save_some, bucket_url, [1, 2, 3, 4], 2)
    assert steps_of(bucket_url) == [3, 4]
    assert files_of(bucket_url) == named_by_the_log(bucket_url)
    run(2, checkpointing.save_some, bucket_url, [5], None)
    assert steps_of(bucket_url) == [3, 4, 5]


def test_a_step_that_this_round_saved_or_restored_is_not_written_again(file_url: str) -> None:
    state, checkpointer = checkpointing.training(), Checkpointer(file_url)
    checkpointer.save(1, state)
    checkpointer.wait()
    before = log_of(file_url)
    checkpointer.save(1, state)
    checkpointer.wait()
    again = Checkpointer(file_url)
    again.restore(state)
    again.save(1, state)
    again.wait()
    assert log_of(file_url).entries == before.entries


def test_what_dead_rounds_left_is_swept_and_nothing_that_is_needed(file_url: str) -> None:
    run(1, checkpointing.save_some, file_url, [1])
    (kept,) = log_of(file_url).entries
    store = open_bucket(file_url)
    store.put("7-r1.0/00000-0000", b"of a round that died")
    store.put("9-r99.0/00000-0000", b"of a round to come")
    store.put("notes/9-r1/readme", b"not ours")
    run(1, checkpointing.save_some, file_url, [2])
    assert named_by_the_log(file_url) <= files_of(file_url)
    others = files_of(file_url) - named_by_the_log(file_url)
    assert others == {"9-r99.0/00000-0000", "notes/9-r1/readme"}
    assert kept in log_of(file_url).entries


def test_killed_before_any_write_of_a_save_a_whole_checkpoint_is_found(file_url: str, tmp_path: Path) -> None:
    """Kill -9 of rank 0 and of another, before each of their writes: shards, index, commit, deletion of the old one."""
    ((first, second), _) = run(2, checkpointing.save_and_stop, f"{file_url}-whole", 0, -1, 0, "")
    killed: dict[int, int] = {}
    found_steps = []
    for rank in (1, 0):
        for nth in count(1):
            url, mark = f"{file_url}-{rank}-{nth}", tmp_path / f"{rank}-{nth}"
            with Ranks(2, checkpointing.save_and_stop, url, rank, nth, signal.SIGKILL, str(mark)) as ranks:
                ended = ranks.wait(first=rank)
            if not mark.exists():
                assert [end.code for end in ended] == [0, 0], ended
                break
            killed[rank] = nth
            assert ended[rank].code == -signal.SIGKILL
            ((step, found, _),) = run(1, checkpointing.restore_one, url)
            found_steps.append(step)
            assert same(found, {1: first, 2: second}[step or 0]), f"rank {rank}, write {nth}"
            run(2, checkpointing.save_some, url, [3], 1)
            assert steps_of(url) == [3]
            assert files_of(url) == named_by_the_log(url), "what the killed one left behind is swept"
    # Of rank 1 its two files; of rank 0 also the index, the commit, and the old checkpoint's five files.
    assert killed == {1: 2, 0: 2 + 1 + 1 + 5}
    assert found_steps == [1] * (2 + 2 + 1 + 1) + [2] * 5


@pytest.mark.parametrize("nth", [1, 4])
def test_a_sleeper_of_an_older_round_commits_nothing_over_a_newer_one(file_url: str, tmp_path: Path, nth: int) -> None:
    """Frozen before its first shard, or just before its commit; then a newer round restores, saves and goes on."""
    mark = tmp_path / "asleep"
    with Ranks(1, checkpointing.save_and_stop, file_url, 0, nth, signal.SIGSTOP, str(mark)) as sleeper:
        until(mark.exists, f"{mark}")
        ((newer, _),) = run(1, checkpointing.save_some, file_url, [2, 3], 1)
        log = log_of(file_url)
        sleeper.send(0, signal.SIGCONT)
        (end,) = sleeper.wait()
    assert isinstance(end.error, Fenced), end.said
    assert log_of(file_url) == log
    ((step, found, _),) = run(1, checkpointing.restore_one, file_url)
    assert step == 3
    assert same(found, newer)


def test_outside_of_a_job_there_is_no_place_unless_one_is_given(tmp_path: Path) -> None:
    checkpointer = Checkpointer(every=1)
    assert not checkpointer.on
    assert checkpointer.restore({}) is None
    checkpointer.save(1, {"what": object()})
    checkpointer.step(2, {"what": object()})

    state = {"count": 5}
    kept(Checkpointer(str(tmp_path / "a folder")), 1, state)
    Checkpointer(str(tmp_path / "a folder")).restore(found := {"count": 0})
    assert found == state


def test_in_a_job_the_place_and_the_round_are_the_jobs_own(
    bucket_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = WorkerContext("demo", bucket_url, "digits-3", 7, "node-0", tmp_path, tmp_path, tmp_path)
    for name, value in context.env().items():
        monkeypatch.setenv(name, value)
    kept(Checkpointer(), 4, {"count": 5})
    (entry,) = listing.committed(open_bucket(bucket_url), "digits-3")
    assert (entry.step, entry.round, entry.path) == (4, 7, entry.path)
    assert entry.path.startswith("4-r7.")
    monkeypatch.setenv("GPUCTL_ROUND", "6")
    with pytest.raises(Fenced, match="round 7 of this job has begun, so round 6 may not write"):
        Checkpointer().restore({"count": 0})


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "loss",
    [torch.tensor(0.5), torch.tensor([0.5], requires_grad=True), np.float32(0.5), np.float64(0.5), np.array(0.5)],
)
def test_a_metric_may_be_a_tensor_or_numpys_and_so_may_a_step(file_url: str, loss: Any) -> None:
    checkpointer = Checkpointer(file_url, every=1)
    for step in (np.int64(1), 2):
        checkpointer.step(step, {"count": 1}, {"loss": loss})  # type: ignore[arg-type]
        checkpointer.wait()
    assert [(entry.step, entry.metrics) for entry in log_of(file_url).entries] == [
        (1, {"loss": 0.5}),
        (2, {"loss": 0.5}),
    ]


@pytest.mark.parametrize(
    ("step", "metrics", "said"),
    [
        (1, {"loss": torch.zeros(2)}, r"metrics\['loss'\] is not a number but tensor\(\[0\., 0\.\]\); give a float"),
        (1, {"loss": None}, r"metrics\['loss'\] is not a number but None"),
        (1.5, {}, r"step=1\.5 is not a number of optimizer steps; use an int"),
    ],
)
def test_what_is_no_number_is_refused_by_name_and_ends_nothing(
    file_url: str, step: Any, metrics: Any, said: str
) -> None:
    checkpointer = Checkpointer(file_url)
    with pytest.raises(BadInput, match=said):
        checkpointer.save(step, {"count": 1}, metrics)
    kept(checkpointer, 2, {"count": 2})
    assert steps_of(file_url) == [2]


@pytest.mark.parametrize("option", [{"every": 0}, {"keep": 0}])
def test_an_interval_of_nothing_is_refused(option: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match="use 1 or more"):
        Checkpointer(**option)


def test_a_save_every_so_many_steps(file_url: str) -> None:
    state, checkpointer = checkpointing.training(), Checkpointer(file_url, every=3, keep=None, when_busy="wait")
    for step in range(1, 8):
        checkpointer.step(step, state)
    checkpointer.wait()
    assert steps_of(file_url) == [3, 6]
    assert torch.equal(state["average"], torch.zeros(2, dtype=torch.float64))


def test_ranks_that_save_different_steps_are_refused_on_all_of_them(file_url: str) -> None:
    with Ranks(2, checkpointing.save_at_odds, file_url, [5, 6]) as ranks:
        ended = ranks.wait()
    assert [type(end.error) for end in ended] == [BadInput, BadInput]
    assert all("the ranks save different steps: [5, 6]" in str(end.error) for end in ended)


def test_where_one_rank_cannot_keep_its_state_none_waits_for_it(file_url: str) -> None:
    with Ranks(2, checkpointing.save_at_odds, file_url, [5, 5], 1) as ranks:
        ended = ranks.wait()
    assert [type(end.error) for end in ended] == [BadInput, BadInput]
    assert "the ranks save different steps: [5, -1]" in str(ended[0].error)
    assert "handle" in str(ended[1].error)


def test_who_leaves_a_round_that_is_over_is_told_so(file_url: str) -> None:
    checkpointer = Checkpointer(file_url)
    checkpointer.save(1, {"count": 1})
    checkpointer.wait()
    Checkpointer(file_url).restore({"count": 0})  # a newer one has begun
    checkpointer.save(2, {"count": 2})
    with pytest.raises(Fenced):
        checkpointer.leave()


def test_a_training_of_a_round_that_is_over_is_told_so_between_two_steps(file_url: str) -> None:
    checkpointer = Checkpointer(file_url)
    checkpointer.save(1, {"count": 1})
    checkpointer.wait()
    Checkpointer(file_url).restore({"count": 0})  # a newer one has begun
    checkpointer.save(2, {"count": 2})
    with pytest.raises(Fenced):
        until(lambda: checkpointer.should_stop(2), "the word")


def test_who_leaves_waits_for_the_bucket_until_its_deadline_and_no_longer(
    file_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Then it is killed; until then it can still say that it has left in good order."""
    context = WorkerContext("demo", f"file://{tmp_path}/other", "job-1", 1, "node-0", tmp_path, tmp_path, tmp_path)
    for name, value in context.env().items():
        monkeypatch.setenv(name, value)
    answers = threading.Event()

    class Silent(Bucket):
        def put(self, key: str, data: bytes | memoryview) -> None:
            assert answers.wait(PATIENCE_S)
            super().put(key, data)

    plain = open_bucket(file_url)
    checkpointer = Checkpointer(store=Silent(plain.raw, plain.url))
    checkpointer.save(1, {"count": 1})
    (tmp_path / DEADLINE).write_text(f"{time.monotonic() + 0.3:.3f}")
    try:
        with pytest.raises(SystemExit) as left:
            checkpointer.leave()
    finally:
        answers.set()
    assert left.value.code == 0
    assert "leaving without a last checkpoint: " in capsys.readouterr().err
    checkpointer.wait()


def test_no_rank_leaves_while_another_waits_for_its_last_checkpoint(file_url: str, tmp_path: Path) -> None:
    """Rank 0 may be who serves the others' store."""
    with Ranks(2, checkpointing.leave_apart, file_url, str(tmp_path)) as ranks:
        assert [end.code for end in ranks.wait()] == [0, 0]
    released, left = (float((tmp_path / name).read_text()) for name in ("released", "left.1"))
    assert left >= released
