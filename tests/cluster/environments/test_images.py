"""Images in the bucket: what a name means, and what goes with an image that is removed."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from gpuctl.cluster import layout
from gpuctl.cluster.environments import images
from gpuctl.cluster.errors import BadInput, GpuctlError
from gpuctl.cluster.records.images import ImageLayer, StoredImage
from gpuctl.cluster.storage.bucket import Bucket, open_bucket

_BASE, _TOP, _NEW = (
    ImageLayer(sha256=digit * 64, bytes=100, stored_bytes=size) for digit, size in (("a", 10), ("b", 20), ("c", 40))
)
ONE = StoredImage(digest="1" * 64, name="mine", config="{}", layers=(_BASE, _TOP, _TOP), node="node-0", built_at=1.0)


@pytest.fixture
def store() -> Bucket:
    bucket = open_bucket("memory://")
    publish(bucket, ONE)
    return bucket


def publish(bucket: Bucket, image: StoredImage) -> None:
    for layer in image.layers:
        bucket.put(layout.image_layer(layer.sha256), bytes(layer.stored_bytes))
    images.publish(bucket, image)


def layers(store: Bucket) -> set[str]:
    return {entry.key for entry in store.list(f"{layout.IMAGES}/layers")}


def test_a_job_keeps_the_image_that_its_name_meant(store: Bucket) -> None:
    pinned = images.pinned(store, "bucket:mine")
    assert pinned == f"bucket:mine@sha256:{'1' * 64}"
    publish(store, replace(ONE, digest="2" * 64, layers=(_BASE, _NEW)))
    assert images.pinned(store, "bucket:mine") == f"bucket:mine@sha256:{'2' * 64}"
    assert images.pinned(store, pinned) == pinned, "also where somebody names it in full"
    assert images.digest_of(pinned) == "1" * 64
    assert images.local_name(pinned) == f"localhost/gpuctl/mine:{'1' * 12}"


@pytest.mark.parametrize("image", ["", "debian:12", "ghcr.io/me/mine@sha256:12"])
def test_a_registrys_image_is_left_as_it_is(store: Bucket, image: str) -> None:
    assert images.pinned(store, image) == image
    assert images.digest_of(image) == "" and images.shown(image) == image


@pytest.mark.parametrize(
    ("image", "message"),
    [
        ("bucket:other", "there is no image bucket:other in the bucket; there are: bucket:mine"),
        (f"bucket:mine@sha256:{'3' * 64}", "there is no image bucket:mine@sha256:333"),
        ("bucket:", "'' cannot be the name of an image"),
        ("bucket:../mine", "'../mine' cannot be the name of an image; use a-z"),
        ("bucket:Mine", "'Mine' cannot be the name"),
        ("bucket:all", "an image cannot be called all"),
        (f"bucket:{'m' * 101}", "cannot be the name"),
    ],
)
def test_one_that_is_not_there_is_told(store: Bucket, image: str, message: str) -> None:
    with pytest.raises(BadInput) as caught:
        images.pinned(store, image)
    assert message in str(caught.value)


def test_what_others_have_stays_when_one_is_removed(store: Bucket) -> None:
    publish(store, replace(ONE, digest="2" * 64, name="other", layers=(_BASE, _NEW)))
    listed = images.listed(store)
    assert [(one.name, one.stored_bytes) for one in listed] == [("mine", 30), ("other", 50)]
    assert images.remove(store, [images.find(listed, "mine")]) == 20
    assert layers(store) == {layout.image_layer(layer.sha256) for layer in (_BASE, _NEW)}
    assert [one.name for one in images.listed(store)] == ["other"]
    assert images.remove(store, images.listed(store)) == 50
    assert store.list(layout.IMAGES) == []


def test_one_is_found_by_its_name_or_the_beginning_of_its_digest(store: Bucket) -> None:
    publish(store, replace(ONE, digest="12" + "2" * 62, layers=(_NEW,)))
    listed = images.listed(store)
    assert [(one.name, one.image.digest[:2]) for one in listed] == [("mine", "12"), ("", "11")]
    for name in ("mine", "bucket:mine", "12"):
        assert images.find(listed, name).image.digest.startswith("12")
    assert images.find(listed, "11").name == ""
    for name, problem in (("1", "is the beginning of several"), ("other", "is not an image in the bucket")):
        with pytest.raises(BadInput, match=problem):
            images.find(listed, name)


def test_two_names_for_one_image_are_two_until_both_are_removed(store: Bucket) -> None:
    publish(store, replace(ONE, name="other"))
    assert [one.name for one in images.listed(store)] == ["mine", "other"]
    assert images.remove(store, [images.find(images.listed(store), "other")]) == 0
    assert images.pinned(store, "bucket:mine") and [one.name for one in images.listed(store)] == ["mine"]
    assert images.remove(store, images.listed(store)) == 30
    assert store.list(layout.IMAGES) == []


def test_one_whose_layer_was_removed_while_it_was_built_is_not_known(store: Bucket) -> None:
    with pytest.raises(GpuctlError, match="a layer of this image was removed from the bucket meanwhile"):
        images.publish(store, replace(ONE, digest="2" * 64, name="new", layers=(_NEW,)))
    assert [one.name for one in images.listed(store)] == ["mine"]


def test_a_name_that_cannot_be_read_is_left_out(store: Bucket) -> None:
    store.put(layout.image_name("odd"), b"garbage")
    assert [one.name for one in images.listed(store)] == ["mine"]


def test_layers_of_builds_that_never_ended_go_a_day_later(store: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    orphan = layout.image_layer("d" * 64)
    store.put(orphan, bytes(5))
    images.remove(store, [])
    assert store.get(orphan) is not None
    monkeypatch.setattr(images, "_DAY_S", -60.0)
    assert images.remove(store, []) == 5
    assert store.get(orphan) is None and len(layers(store)) == 2


def test_one_that_another_version_wrote_is_left_out(store: Bucket) -> None:
    store.put(layout.image("9" * 64), b"{}")
    assert [one.name for one in images.listed(store)] == ["mine"]
