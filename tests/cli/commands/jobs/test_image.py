"""``gpuctl image``: what can be built, what is listed, and that nothing goes that a job needs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpuctl.cluster import layout
from gpuctl.cluster.environments import images
from gpuctl.cluster.records.images import ImageLayer, StoredImage
from gpuctl.cluster.records.rounds import JobOutcome
from tests.fakes.written_cluster import WrittenCluster

_BASE = ImageLayer(sha256="a" * 64, bytes=2_000_000, stored_bytes=3000)
_TOP = ImageLayer(sha256="b" * 64, bytes=1_000_000, stored_bytes=2000)
ONE = StoredImage(digest="1" * 64, name="mine", config="{}", layers=(_BASE, _TOP), node="node-0", built_at=1.0)


@pytest.fixture
def two(written: WrittenCluster) -> WrittenCluster:
    """Two images, of which the second is in use by a job in line."""
    (written.work / "train.py").touch()
    for image in (ONE, replace(ONE, digest="2" * 64, name="other", layers=(_BASE,))):
        for layer in image.layers:
            written.store.put(layout.image_layer(layer.sha256), bytes(layer.stored_bytes))
        images.publish(written.store, image)
    written.run("train", "-d", "--image", "bucket:other", "train.py")
    return written


def test_they_are_listed_with_what_they_take(two: WrittenCluster) -> None:
    images.publish(two.store, replace(ONE, digest="3" * 64))
    header, *lines = two.run("image", "ls").stdout.splitlines()
    assert header.split() == ["NAME", "IMAGE", "LAYERS", "SIZE", "STORED", "BUILT", "ON"]
    assert [line.split("  ")[0] for line in lines] == ["mine", "other", "(mine before)"]
    assert lines[0].split()[1:7] == ["3" * 12, "2", "3.0", "MB", "5.0", "kB"]
    assert lines[0].split()[-1] == "node-0"
    listed = json.loads(two.run("image", "ls", "-o", "json").stdout)
    assert [(one["name"], one["image"][0], one["stored_bytes"]) for one in listed] == [
        ("mine", "3", 5000),
        ("other", "2", 3000),
        ("", "1", 5000),
    ]


def test_a_job_has_the_image_that_the_name_means_when_it_is_submitted(two: WrittenCluster) -> None:
    images.publish(two.store, replace(ONE, digest="3" * 64, name="other"))
    (job,) = json.loads(two.run("jobs", "-o", "json").stdout)
    spec = json.loads(two.store.get(layout.job_spec(job["job"])) or b"")
    assert spec["image"] == f"bucket:other@sha256:{'2' * 64}"


def test_one_that_is_not_there_is_told_before_anything_is_sent(two: WrittenCluster) -> None:
    (two.work / "new.py").write_text("print(1)")
    said = two.run("train", "-d", "--image", "bucket:third", "new.py", code=2).stderr
    assert "there is no image bucket:third in the bucket; there are: bucket:mine, bucket:other" in said
    assert "code (" not in said


def test_one_is_removed_once_that_is_confirmed_and_shared_layers_stay(two: WrittenCluster) -> None:
    assert "nothing was removed; confirm with --yes" in two.run("image", "rm", "mine", code=2).stderr
    assert "removed mine: 2.0 kB" in two.run("image", "rm", "-y", "mine", "bucket:mine").stderr
    assert [one.name for one in images.listed(two.store)] == ["other"]
    assert [entry.key for entry in two.store.list(f"{layout.IMAGES}/layers")] == [layout.image_layer(_BASE.sha256)]


def test_one_that_a_job_needs_stays_until_that_is_over(two: WrittenCluster) -> None:
    for names in (["other"], ["all"], ["2222"]):
        said = two.run("image", "rm", "-y", *names, code=2).stderr
        assert "image other is in use by train-1; wait, or: gpuctl cancel train-1" in said
    assert len(images.listed(two.store)) == 2
    two.end("train-1", 1, JobOutcome(result="succeeded", exit_code=0))
    two.run("image", "rm", "-y", "all")
    assert two.store.list(layout.IMAGES) == []
    assert "no images yet" in two.run("image", "ls").stderr
    assert "no images" in two.run("image", "rm", "all").stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nowhere"], "nowhere is not a folder; name the one with the Dockerfile"),
        (["empty"], "empty has no Dockerfile or Containerfile; write one, or name it with --file"),
        (["mine", "-f", "gpu.Dockerfile"], "mine has no gpu.Dockerfile; write one"),
        (["mine", "-f", "../Dockerfile"], "../Dockerfile is outside of mine, and only that is copied to the node"),
        (
            ["mine", "--name", "Mine"],
            "'Mine' cannot be the name of an image; use a-z, 0-9 and single -, _ or . between",
        ),
        (["mine", "--name", "x", "--push", "me/x"], "--name and --push exclude each other"),
        (["mine", "--push", "bucket:x"], "--push bucket:x is not a registry's image; for the bucket: --name x"),
        (["mine", "--name", "all"], "an image cannot be called all; `gpuctl image rm all` means every image"),
        (["mine", "--push", "Me/x y"], "--push Me/x y is not the name of an image; use one such as ghcr.io/me/mine:1"),
        (["mine", "-f", "x" * 300], "File name too long; name a Dockerfile below the folder"),
        (["mine", "--", "--tag", "x"], "--tag after `--` is not for you to give; see --name"),
        (["mine", "--", "--output=x"], "--output after `--` is not for you to give"),
        (["___"], "the folder's name cannot be an image's; give one with --name"),
        (["mine", "--node", "7"], "the cluster has no nodes yet"),
    ],
)
def test_what_cannot_be_built_is_told_in_a_line(written: WrittenCluster, args: list[str], message: str) -> None:
    for name in ("empty", "mine", "___"):
        (written.work / name).mkdir()
    for path in ("Dockerfile", "mine/Dockerfile", "___/Dockerfile"):
        Path(written.work, path).touch()
    said = written.run("image", "build", *args, code=2).stderr
    assert message in said and len(said.splitlines()) == 1
    assert written.store.list("code") == []
