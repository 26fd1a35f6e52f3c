"""Environments in the bucket: what a request means is decided once, and a removal leaves nothing of it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from gpuctl.cluster import layout
from gpuctl.cluster.environments import registry
from gpuctl.cluster.errors import BadInput
from gpuctl.cluster.records.environments import Environment, PackedFiles
from gpuctl.cluster.storage.bucket import Bucket, open_bucket

ONE = Environment(
    digest="1" * 64,
    file="requirements.txt",
    packages={"einops": "0.8.2"},
    bytes=10,
    files=1,
    pack=PackedFiles(sha256="a" * 64, bytes=5),
    built_at=1.0,
)
OTHER = replace(ONE, digest="2" * 64, packages={"einops": "0.8.3"})


@pytest.fixture
def store() -> Bucket:
    return open_bucket("memory://")


def test_what_a_request_means_is_decided_once(store: Bucket) -> None:
    assert registry.resolved(store, "r") is None
    assert registry.publish(store, "r", ONE) == ONE
    assert registry.publish(store, "r", OTHER) == ONE, "the second node adopts what the first has published"
    assert registry.resolved(store, "r") == ONE
    assert registry.built(store, OTHER.digest) == OTHER


def test_the_first_record_of_an_environment_stays(store: Bucket) -> None:
    registry.publish(store, "r", ONE)
    again = replace(ONE, pack=PackedFiles(sha256="b" * 64, bytes=6))
    assert registry.publish(store, "s", again) == ONE, "its archive is the one that was uploaded"


def test_they_are_listed_with_their_jobs_and_what_they_take(store: Bucket) -> None:
    registry.publish(store, "r", ONE)
    registry.publish(store, "s", OTHER)
    store.put(layout.environment_archive(OTHER.digest, "a" * 64), b"12345")
    registry.note_use(store, OTHER.digest, "train-1")
    registry.note_use(store, OTHER.digest, "train-2")
    first, second = registry.listed(store)
    assert (first.environment, first.jobs) == (OTHER, ("train-1", "train-2"))
    assert (second.environment, second.jobs, second.used_at) == (ONE, (), 1.0)
    assert first.bytes - second.bytes == 5


def test_one_that_is_removed_leaves_nothing_and_can_be_published_again(store: Bucket) -> None:
    registry.publish(store, "r", ONE)
    registry.publish(store, "r2", ONE)
    registry.publish(store, "s", OTHER)
    store.put(layout.environment_archive(ONE.digest, "a" * 64), b"12345")
    registry.note_use(store, ONE.digest, "train-1")
    registry.remove(store, ONE.digest)
    assert registry.resolved(store, "r") is None and registry.resolved(store, "r2") is None
    assert [entry.key for entry in store.list("environments") if ONE.digest in entry.key] == []
    assert len(store.list("environments/requests")) == 1
    assert registry.resolved(store, "s") == OTHER
    registry.publish(store, "r", OTHER)
    assert registry.resolved(store, "r") == OTHER


def test_a_request_whose_environment_is_gone_is_answered_anew(store: Bucket) -> None:
    registry.publish(store, "r", ONE)
    store.delete([layout.environment(ONE.digest)])
    assert registry.resolved(store, "r") is None
    assert registry.publish(store, "r", OTHER) == OTHER
    assert registry.resolved(store, "r") == OTHER


def test_one_is_found_by_the_beginning_of_its_digest(store: Bucket) -> None:
    registry.publish(store, "r", ONE)
    registry.publish(store, "s", OTHER)
    stored = registry.listed(store)
    assert registry.find(stored, "11").environment == ONE
    for name, message in (("3", "is not an environment; there are: "), ("", "is not an environment")):
        with pytest.raises(BadInput, match=message):
            registry.find(stored, name)
    registry.publish(store, "t", replace(ONE, digest="12" + "3" * 62))
    with pytest.raises(BadInput, match="is the beginning of several"):
        registry.find(registry.listed(store), "1")
