"""Images that a node has pulled, when its disk is full."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpuctl.bootstrap.containers.node_containers import Containers
from gpuctl.bootstrap.containers.old_images import PulledImages
from gpuctl.cluster.storage.bucket import open_bucket

_DOCKER = """#!/bin/sh
cd "$(dirname "$0")"
case "$1 $2" in
    "--version "*) echo Docker version 28 ;;
    "info --format") case "$3" in *RootDir*) pwd ;; *) echo 28 ;; esac ;;
    "image inspect") test -e "images/$(basename "$5")" ;;
    "pull "*) for name; do :; done; touch "images/$(basename "$name")" ;;
    rmi*) echo "$2" >> removed; test ! -e held && rm "images/$(basename "$2")" ;;
esac
"""


class Node:
    """One whose disk is full while it has more than three images, with a stand-in for Docker."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.said: list[str] = []
        (folder / "images").mkdir()
        program = folder / "docker"
        program.write_text(_DOCKER)
        program.chmod(0o755)
        path = {"PATH": f"{folder}:{os.environ['PATH']}"}
        used = lambda _: 0.9 if len(self.images()) >= 3 else 0.5  # noqa: E731
        self.containers = Containers(
            folder, open_bucket("memory://"), {}, path, False, self.said.append, lambda: None, used
        )

    def images(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "images").iterdir())


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return Node(tmp_path)


def test_before_the_next_pull_the_image_goes_that_was_used_longest_ago(node: Node) -> None:
    for name in ("a", "b", "c"):
        node.containers.fetch(f"registry.example/{name}:1")
    node.containers.fetch("registry.example/a:1")
    node.containers.fetch("registry.example/d:1")
    assert node.images() == ["a:1", "c:1", "d:1"]
    assert "removing image registry.example/b:1, which no job has used since others came" in node.said
    node.containers.fetch("registry.example/b:1")
    assert node.images() == ["a:1", "b:1", "d:1"], "what is gone is pulled again"


def test_images_that_somebody_else_brought_stay(node: Node) -> None:
    for name in ("theirs:1", "too:1", "three:1", "four:1"):
        (node.folder / "images" / name).touch()
    for name in ("theirs:1", "too:1", "three:1", "four:1", "ours:1"):
        node.containers.fetch(f"registry.example/{name}")
    assert node.images() == ["four:1", "ours:1", "theirs:1", "three:1", "too:1"]


def test_an_image_that_a_container_has_stays_and_is_known_to(node: Node) -> None:
    for name in ("a", "b", "c"):
        node.containers.fetch(f"registry.example/{name}:1")
    (node.folder / "held").touch()
    node.containers.fetch("registry.example/d:1")
    assert node.images() == ["a:1", "b:1", "c:1", "d:1"]
    (node.folder / "held").unlink()
    node.containers.fetch("registry.example/e:1")
    assert node.images() == ["c:1", "d:1", "e:1"]


def test_what_was_pulled_is_known_to_the_agents_next_life_and_the_newest_two_stay(tmp_path: Path) -> None:
    now, note, removed = [0.0], tmp_path / "images.json", list[str]()

    def images() -> PulledImages:
        return PulledImages(note, lambda _: None, lambda _: 0.99, lambda: now[0])

    for name in ("a", "b", "c", "d"):
        now[0] += 1
        images().pulled(name)
    images().make_room(tmp_path, lambda name: not removed.append(name))  # type: ignore[func-returns-value]
    assert removed == ["a", "b"]
    note.write_text("half a fi")
    assert images().make_room(tmp_path, lambda _: True) == []


def test_with_room_on_the_disk_or_where_it_cannot_be_seen_nothing_goes(tmp_path: Path) -> None:
    images = PulledImages(tmp_path / "images.json", lambda _: None, lambda _: 0.7)
    for name in ("a", "b", "c", "d"):
        images.pulled(name)
    assert images.make_room(tmp_path, lambda _: True) == []
    elsewhere = PulledImages(tmp_path / "images.json", lambda _: None)
    assert elsewhere.make_room(tmp_path / "on another machine", lambda _: True) == []
