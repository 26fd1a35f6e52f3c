"""What lies in the bucket: raw tensors and JSON, and that a forged checkpoint runs nothing where it is read."""

from __future__ import annotations

import json
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpuctl import Checkpointer
from gpuctl.cluster.agreement import ledgers
from gpuctl.cluster.checkpoints.manifest import blocks_of, digest, manifest_key, read_manifest
from gpuctl.cluster.records.checkpoints import CheckpointIndex
from gpuctl.cluster.storage.bucket import Bucket, open_bucket
from tests.trainers.rank_scripts import checkpointing
from tests.trainers.rank_scripts.checkpointing import kept, same
from tests.trainers.ranks import Ranks, run


class Bomb:
    """Touches a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = str(mark)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mknod, (self._mark,)


def log_of(store: Bucket) -> tuple[CheckpointIndex, int]:
    version = ledgers.checkpoints_in(store).read()
    assert version.value is not None
    return version.value, version.number


def forge(store: Bucket, change: Callable[[dict[str, Any]], None]) -> None:
    """Commit the newest checkpoint once more with a changed manifest, with its digest right."""
    log, number = log_of(store)
    entry = log.entries[-1]
    manifest = json.loads(store.get(manifest_key(entry)) or b"")
    change(manifest)
    data = json.dumps(manifest).encode()
    store.put(manifest_key(entry), data)
    entry = msgspec.structs.replace(entry, digest=digest(data))
    changed = msgspec.structs.replace(log, entries=(*log.entries[:-1], entry))
    assert ledgers.checkpoints_in(store).commit(changed, number)


def smuggle(store: Bucket, manifest: dict[str, Any], data: bytes) -> list[list[int]]:
    """Put ``data`` as one more part, with all digests right; what refers to it."""
    store.put("part-of-the-forger", data)
    blocks = [digest(data[low:high]) for low, high in blocks_of(len(data))]
    manifest["parts"].append({"key": "part-of-the-forger", "size": len(data), "blocks": blocks})
    return [[len(manifest["parts"]) - 1, 0, len(data)]]


def watched_restore(url: str) -> tuple[str, list[str]]:
    """What ``restore`` raised, and which audited events it caused that run or load code (see ``sys.addaudithook``)."""
    state, seen = checkpointing.training(seed=1), []

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("pickle.find_class", "os.system", "subprocess.Popen", "os.mknod"):
            seen.append(f"{event} {arguments[:2]}")

    Checkpointer(url).on  # noqa: B018 - whatever is imported late is in memory now
    sys.addaudithook(watch)
    try:
        Checkpointer(url).restore(state)
    except Exception as error:  # noqa: BLE001 - any is told
        return type(error).__name__, seen
    return "", seen


def test_every_byte_in_the_bucket_is_json_or_a_tensor_or_zero(bucket_url: str) -> None:
    run(2, checkpointing.save_some, bucket_url, [1, 2], 2)
    store = open_bucket(bucket_url)
    entries = log_of(store)[0].entries
    assert [entry.step for entry in entries] == [1, 2]
    for entry in entries:
        manifest = read_manifest(store, entry)
        left = [bytearray(store.get(part.key) or b"") for part in manifest.parts]
        for pieces in manifest.values.values():
            json.loads(b"".join(left[piece.part][piece.at : piece.at + piece.size] for piece in pieces))
        tensors = [piece for t in manifest.tensors.values() for chunk in t.chunks for piece in chunk.pieces]
        for piece in [*tensors, *(piece for pieces in manifest.values.values() for piece in pieces)]:
            left[piece.part][piece.at : piece.at + piece.size] = bytes(piece.size)
        assert not any(map(any, left))
    for item in store.list("ledger"):
        json.loads(store.get(item.key) or b"")


def test_a_restore_unpickles_nothing(file_url: str) -> None:
    run(1, checkpointing.save_some, file_url, [1])
    assert run(1, watched_restore, file_url) == [("", [])]


Forgery = Callable[[Bucket, dict[str, Any], bytes], None]


def _value_is_a_pickle(store: Bucket, manifest: dict[str, Any], bomb: bytes) -> None:
    for name in manifest["values"]:
        manifest["values"][name] = smuggle(store, manifest, bomb)


def _tensor_is_a_pickle(store: Bucket, manifest: dict[str, Any], bomb: bytes) -> None:
    for tensor in manifest["tensors"].values():
        tensor["chunks"][0]["pieces"] = smuggle(store, manifest, bomb)


def _object_of_a_kind_unheard_of(store: Bucket, manifest: dict[str, Any], _bomb: bytes) -> None:
    odd = json.dumps({"kind": "object", "of": [["__reduce__", "os.system"]]}).encode()
    manifest["values"]["@plain.model"] = smuggle(store, manifest, odd)


def _dtype_is_a_function(_store: Bucket, manifest: dict[str, Any], _bomb: bytes) -> None:
    for tensor in manifest["tensors"].values():
        tensor["dtype"] = "load"


def _part_lies_elsewhere(_store: Bucket, manifest: dict[str, Any], _bomb: bytes) -> None:
    for part in manifest["parts"]:
        part["key"] = "../../outside.bin"


def _pieces_run_past_the_end(_store: Bucket, manifest: dict[str, Any], _bomb: bytes) -> None:
    for tensor in manifest["tensors"].values():
        for chunk in tensor["chunks"]:
            chunk["pieces"] = [[part, 1 << 40, size] for part, _, size in chunk["pieces"]]


def _pieces_are_of_no_part(_store: Bucket, manifest: dict[str, Any], _bomb: bytes) -> None:
    for tensor in manifest["tensors"].values():
        for chunk in tensor["chunks"]:
            chunk["pieces"] = [[1 << 20, at, size] for _, at, size in chunk["pieces"]]


def _chunks_are_too_short(_store: Bucket, manifest: dict[str, Any], _bomb: bytes) -> None:
    for tensor in manifest["tensors"].values():
        for chunk in tensor["chunks"]:
            chunk["pieces"] = []


def _shape_is_another(_store: Bucket, manifest: dict[str, Any], _bomb: bytes) -> None:
    for tensor in manifest["tensors"].values():
        tensor["shape"] = [1 << 20, 1 << 20]


FORGERIES = [
    _value_is_a_pickle,
    _tensor_is_a_pickle,
    _object_of_a_kind_unheard_of,
    _dtype_is_a_function,
    _part_lies_elsewhere,
    _pieces_run_past_the_end,
    _pieces_are_of_no_part,
    _chunks_are_too_short,
    _shape_is_another,
]


@pytest.mark.parametrize("forgery", FORGERIES, ids=lambda change: change.__name__.strip("_"))
def test_a_forged_checkpoint_is_refused_and_runs_nothing(file_url: str, tmp_path: Path, forgery: Forgery) -> None:
    """Its digests are right: whoever forged it may write to the bucket."""
    run(1, checkpointing.save_some, file_url, [1])
    store, mark = open_bucket(file_url), tmp_path / "boom"
    (tmp_path / "outside.bin").write_bytes(b"{}")
    bomb = pickle.dumps(Bomb(mark))
    forge(store, lambda manifest: forgery(store, manifest, bomb))
    ((raised, events),) = run(1, watched_restore, file_url)
    assert raised in ("Damaged", "BadInput"), "the latter for a checkpoint of another model"
    assert events == []
    assert not mark.exists()


@pytest.mark.parametrize("which", ["manifest.json", "00000-0000", "00001-0000"])
def test_a_file_that_was_cut_short_is_noticed_before_it_is_read(bucket_url: str, which: str) -> None:
    (expected, _), _ = run(2, checkpointing.save_some, bucket_url, [1])
    run(2, checkpointing.save_some, bucket_url, [2])
    store = open_bucket(bucket_url)
    key = f"{log_of(store)[0].entries[-1].path}/{which}"
    store.put(key, (store.get(key) or b"")[:-1])
    for step, found, _ in run(2, checkpointing.restore_one, bucket_url):
        assert step == 1
        assert same(found, expected)


def test_a_part_of_another_step_is_noticed(file_url: str) -> None:
    (expected, _), _ = run(2, checkpointing.save_some, file_url, [1])
    run(2, checkpointing.save_some, file_url, [2])
    store = open_bucket(file_url)
    first, second = log_of(store)[0].entries
    store.put(f"{second.path}/00001-0000", store.get(f"{first.path}/00001-0000") or b"")
    with Ranks(2, checkpointing.restore_one, file_url) as ranks:
        ended = ranks.wait()
    said = f"gpuctl: checkpoint of step 2 is damaged: {second.path}/00001-0000 is not what was written\n"
    assert [end.said for end in ended] == [said, ""]
    assert [end.value[0] for end in ended] == [1, 1]
    assert all(same(end.value[1], expected) for end in ended)


def test_a_process_may_replace_the_damaged_checkpoint_that_it_passed_over(file_url: str) -> None:
    state, checkpointer = checkpointing.training(), Checkpointer(file_url)
    for step in (1, 2):
        checkpointing.train(state)
        checkpointer.save(step, state)
    checkpointer.wait()
    store = open_bucket(file_url)
    path = log_of(store)[0].entries[-1].path
    store.put(f"{path}/00000-0000", b"damaged")
    assert checkpointer.restore(state) == 1
    checkpointing.train(state)
    kept(checkpointer, 2, state)
    expected = checkpointing.facts(state)
    assert Checkpointer(file_url).restore(state) == 2
    assert same(checkpointing.facts(state), expected)


def test_all_ranks_raise_the_same_when_one_finds_damage_and_nothing_is_left(file_url: str) -> None:
    run(2, checkpointing.save_some, file_url, [1])
    store = open_bucket(file_url)
    store.delete([f"{log_of(store)[0].entries[-1].path}/00001-0001"])
    said = {text for text, _ in run(2, checkpointing.refused, file_url, 6, False)}
    assert said == {"Damaged: none of the 1 checkpoints is intact; delete them (gpuctl ckpt rm) to start over"}
