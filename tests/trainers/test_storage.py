"""The files of a checkpoint: what is in them, and that a forged one runs nothing where it is read."""

from __future__ import annotations

import hashlib
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
from gpuctl.cluster.bucket import Bucket, open_bucket
from gpuctl.cluster.ledger import Ledger
from gpuctl.cluster.records import CheckpointLog
from tests.trainers import bodies
from tests.trainers.bodies import same
from tests.trainers.ranks import run


class Bomb:
    """Touches a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = str(mark)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mknod, (self._mark,)


def log_of(store: Bucket) -> tuple[CheckpointLog, int]:
    version = Ledger(store, "ledger", CheckpointLog).read()
    assert version.value is not None
    return version.value, version.number


def forge(store: Bucket, change: Callable[[dict[str, Any]], None], files: dict[str, bytes]) -> None:
    """Commit the newest checkpoint once more with a changed index and other ``files``, with all their digests right."""
    log, number = log_of(store)
    entry = log.entries[-1]
    index = json.loads(store.get(f"{entry.path}/index.json") or b"")
    change(index)
    files = {**files, "index.json": json.dumps(index).encode()}
    for name, data in files.items():
        store.put(f"{entry.path}/{name}", data)
    digests = {**entry.sha256, **{name: hashlib.sha256(data).hexdigest() for name, data in files.items()}}
    entry = msgspec.structs.replace(entry, sha256=digests)
    changed = msgspec.structs.replace(log, entries=(*log.entries[:-1], entry))
    assert Ledger(store, "ledger", CheckpointLog).commit(changed, number)


def watched_restore(url: str) -> tuple[str, list[str]]:
    """What ``restore`` raised, and which audited events it caused that run or load code (see ``sys.addaudithook``)."""
    state, seen = bodies.training(seed=1), []

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
    run(2, bodies.save_some, bucket_url, [1, 2], 2)
    store = open_bucket(bucket_url)
    for entry in log_of(store)[0].entries:
        index = json.loads(store.get(f"{entry.path}/index.json") or b"")
        spans = [chunk["span"] for tensor in index["tensors"].values() for chunk in tensor["chunks"]]
        for name in entry.sha256:
            data = bytearray(store.get(f"{entry.path}/{name}") or b"")
            for span in [*spans, *index["values"].values()]:
                if span["file"] == name:
                    part = slice(span["at"], span["at"] + span["size"])
                    if name.startswith("values"):
                        json.loads(data[part])
                    data[part] = bytes(span["size"])
            assert name == "index.json" or data == bytes(len(data))
    for item in store.list("ledger"):
        json.loads(store.get(item.key) or b"")


def test_a_restore_unpickles_nothing(file_url: str) -> None:
    run(1, bodies.save_some, file_url, [1])
    assert run(1, watched_restore, file_url) == [("", [])]


def _value_is_a_pickle(index: dict[str, Any]) -> None:
    for span in index["values"].values():
        span.update(file="bomb.bin", at=0, size=1 << 20)


def _object_of_a_kind_unheard_of(index: dict[str, Any]) -> None:
    _plain(index).update(file="bomb.json", at=0, size=1 << 20)


def _dtype_is_a_function(index: dict[str, Any]) -> None:
    for tensor in index["tensors"].values():
        tensor["dtype"] = "load"


def _file_lies_elsewhere(index: dict[str, Any]) -> None:
    for span in index["values"].values():
        span["file"] = "../../outside.bin"


def _spans_run_past_the_end(index: dict[str, Any]) -> None:
    for tensor in index["tensors"].values():
        for chunk in tensor["chunks"]:
            chunk["span"]["at"] = 1 << 40


def _shape_is_another(index: dict[str, Any]) -> None:
    for tensor in index["tensors"].values():
        tensor["shape"] = [1 << 20, 1 << 20]


def _plain(index: dict[str, Any]) -> dict[str, Any]:
    span: dict[str, Any] = index["values"]["@plain"]
    return span


FORGERIES = [
    _value_is_a_pickle,
    _object_of_a_kind_unheard_of,
    _dtype_is_a_function,
    _file_lies_elsewhere,
    _spans_run_past_the_end,
    _shape_is_another,
]


@pytest.mark.parametrize("forgery", FORGERIES, ids=lambda change: change.__name__.strip("_"))
def test_a_forged_checkpoint_is_refused_and_runs_nothing(
    file_url: str, tmp_path: Path, forgery: Callable[[dict[str, Any]], None]
) -> None:
    """Its digests are right: whoever forged it may write to the bucket."""
    run(1, bodies.save_some, file_url, [1])
    store, mark = open_bucket(file_url), tmp_path / "boom"
    (tmp_path / "outside.bin").write_bytes(b"{}")
    pickled = pickle.dumps(Bomb(mark))
    odd = json.dumps({"model": {"kind": "object", "of": [["__reduce__", "os.system"]]}}).encode()
    forge(store, forgery, {"bomb.bin": pickled, "bomb.json": odd})
    ((raised, events),) = run(1, watched_restore, file_url)
    assert raised != ""
    assert events == []
    assert not mark.exists()


@pytest.mark.parametrize("name", ["index.json", "values-00000.bin", "tensors-00001-000.bin"])
def test_a_file_that_was_cut_short_is_noticed_before_it_is_read(file_url: str, name: str) -> None:
    (expected, _), _ = run(2, bodies.save_some, file_url, [1])
    run(2, bodies.save_some, file_url, [2])
    store = open_bucket(file_url)
    key = f"{log_of(store)[0].entries[-1].path}/{name}"
    store.put(key, (store.get(key) or b"")[:-1])
    for step, found, _ in run(2, bodies.restore_one, file_url):
        assert step == 1
        assert same(found, expected)


def test_a_process_may_replace_the_damaged_checkpoint_that_it_passed_over(file_url: str) -> None:
    """The new files lie where the old ones did, and are not deleted with them."""
    state, checkpointer = bodies.training(), Checkpointer(file_url)
    for step in (1, 2):
        bodies.train(state)
        checkpointer.save(step, state)
    store = open_bucket(file_url)
    path = log_of(store)[0].entries[-1].path
    store.put(f"{path}/tensors-00000-000.bin", b"damaged")
    assert checkpointer.restore(state) == 1
    bodies.train(state)
    checkpointer.save(2, state)
    expected = bodies.facts(state)
    assert Checkpointer(file_url).restore(state) == 2
    assert same(bodies.facts(state), expected)


def test_all_ranks_raise_the_same_when_one_finds_damage_and_nothing_is_left(file_url: str) -> None:
    run(2, bodies.save_some, file_url, [1])
    store = open_bucket(file_url)
    store.delete([f"{log_of(store)[0].entries[-1].path}/values-00001.bin"])
    said = {text for text, _ in run(2, bodies.refused, file_url, 6, False)}
    assert said == {"Damaged: none of the 1 checkpoints is whole; delete them (gpuctl ckpt rm) to begin anew"}
