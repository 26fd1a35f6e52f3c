"""Objects of a committed checkpoint that are not what was written: each kind of damage to each kind of object."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gpuctl import Checkpointer
from gpuctl.cluster.checkpoints.manifest import MANIFEST
from gpuctl.cluster.storage.bucket import Bucket, open_bucket
from tests.trainers.checkpoint_checks import committed
from tests.trainers.rank_scripts import named_steps
from tests.trainers.rank_scripts.named_steps import at_step, is_at
from tests.trainers.ranks import run


def flip(store: Bucket, key: str, _: str) -> str:
    data = bytearray(store.get(key) or b"")
    data[len(data) // 2] ^= 1
    store.put(key, bytes(data))
    return "is not what was written"


def truncate(store: Bucket, key: str, _: str) -> str:
    store.put(key, (store.get(key) or b"")[:-1])
    return "is not what was written" if key.endswith(MANIFEST) else "is cut short"


def remove(store: Bucket, key: str, _: str) -> str:
    store.delete([key])
    return "is missing"


def take_anothers(store: Bucket, key: str, other: str) -> str:
    """That of the step before."""
    data = store.get(other) or b""
    assert data != store.get(key)
    store.put(key, data)
    return "is not what was written"


HARMS: list[Callable[[Bucket, str, str], str]] = [flip, truncate, remove, take_anothers]


@pytest.mark.slow
def test_damage_is_told_by_name_and_gives_way_to_the_step_before(
    bucket_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    store = open_bucket(bucket_url)
    run(2, named_steps.save_steps, bucket_url, [1, 2], 0, None)
    before, newest = committed(store)
    own = [item.key for item in store.list(newest.path)]
    assert [key.removeprefix(newest.path) for key in own] == [
        "/00000-0000",
        "/00000-0001",
        "/00001-0000",
        f"/{MANIFEST}",
    ]
    for key in own:
        written = store.get(key) or b""
        for harm in HARMS:
            reason = harm(store, key, key.replace(newest.path, before.path))
            state = at_step(0)
            assert Checkpointer(store=store).restore(state) == 1, (key, reason)
            assert is_at(1, state)
            assert capsys.readouterr().err == f"gpuctl: checkpoint of step 2 is damaged: {key} {reason}\n"
        store.put(key, written)
    state = at_step(0)
    assert Checkpointer(store=store).restore(state) == 2
    assert is_at(2, state)
    assert capsys.readouterr().err == ""


def test_two_ranks_pass_over_what_only_one_of_them_reads_damaged(bucket_url: str) -> None:
    """The generators of rank 1 are no affair of rank 0."""
    run(2, named_steps.save_steps, bucket_url, [1], 0, None)
    run(2, named_steps.save_drawn, bucket_url, 2)
    store = open_bucket(bucket_url)
    newest = committed(store)[-1]
    take_anothers(store, f"{newest.path}/00001-0001", f"{committed(store)[0].path}/00001-0001")
    assert run(2, named_steps.save_steps, bucket_url, [], 0, None) == [1, 1]
