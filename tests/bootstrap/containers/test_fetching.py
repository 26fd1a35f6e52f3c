"""What a node does until it has a job's image. The runtime is a program that does as it is told."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from gpuctl.bootstrap.containers import bucket_images, saved_image
from gpuctl.bootstrap.containers.node_containers import Containers
from gpuctl.cluster.environments import images
from gpuctl.cluster.errors import Fenced
from gpuctl.cluster.storage.bucket import Bucket, open_bucket
from tests.bootstrap.containers.test_bucket_images import archive
from tests.waiting import PATIENCE_S, until

_DOCKER = """#!/bin/sh
cd {folder}
case "$1" in
    --version) echo "Docker version 28.0.0" ;;
    image) test -e there ;;
    pull) echo pulled >> pulls; touch there ;;
    load) echo "$TMPDIR" > scratch; touch "$TMPDIR/left"; touch begun; exec sleep 1000 ;;
esac
"""


@pytest.fixture
def store() -> Bucket:
    return open_bucket("memory://")


@pytest.fixture
def containers(tmp_path: Path, store: Bucket, monkeypatch: pytest.MonkeyPatch) -> Containers:
    """Those of the node in ``tmp_path / "node"``, whose Docker works in ``tmp_path``."""
    program = tmp_path / "docker"
    program.write_text(_DOCKER.format(folder=tmp_path))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "node").mkdir()
    return Containers(tmp_path / "node", store, {}, os.environ, False, lambda _: None, lambda: None)


def test_an_image_that_somebody_removed_from_the_node_comes_again(containers: Containers, tmp_path: Path) -> None:
    for _ in range(2):
        containers.fetch("debian:12")
    assert (tmp_path / "pulls").read_text() == "pulled\n"
    (tmp_path / "there").unlink()
    containers.fetch("debian:12")
    assert (tmp_path / "pulls").read_text() == "pulled\npulled\n"


def test_one_of_the_bucket_that_nobody_waits_for_leaves_nothing_on_the_disk(
    containers: Containers, store: Bucket, tmp_path: Path
) -> None:
    """Podman unpacks it to its ``TMPDIR`` first, by default to /var/tmp."""
    with saved_image.opened(archive(tmp_path)) as saved:
        image = bucket_images.upload(store, saved, "mine", "node-0", lambda: False, lambda _: None)
    over, failed = threading.Event(), list[Exception]()

    def fetch() -> None:
        try:
            containers.fetch(f"{images.IN_BUCKET}mine{images.AT}{image.digest}", over.is_set)
        except Fenced as error:
            failed.append(error)

    fetching = threading.Thread(target=fetch)
    fetching.start()
    until((tmp_path / "begun").exists, "the image to be on its way")
    scratch = Path((tmp_path / "scratch").read_text().strip())
    assert scratch.parent == tmp_path / "node" and (scratch / "left").exists()
    over.set()
    fetching.join(PATIENCE_S)
    assert failed and not scratch.exists()
