"""Building an image on a node, with Docker or Podman itself."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from gpuctl.bootstrap.containers.build import BuildOrder
from gpuctl.bootstrap.containers.node_containers import Containers
from gpuctl.bootstrap.identity import NodeIdentity
from gpuctl.cluster.environments import images
from gpuctl.cluster.jobs import code_archive, code_survey
from gpuctl.cluster.storage.bucket import open_bucket
from tests.fakes import containers
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.machines


class Builder:
    """A node's folder, a bucket, and a folder with a Dockerfile."""

    def __init__(self, folder: Path) -> None:
        containers.runtime()
        self.node = folder / "node"
        self.node.mkdir()
        self.context = folder / "mine"
        self.context.mkdir()
        url = (folder / "bucket").as_uri()
        self.store = open_bucket(url)
        self.env = dict(os.environ)
        identity = NodeIdentity(node="node-0", address="127.0.0.1", bucket=url)
        (self.node / "identity.json").write_bytes(msgspec.json.encode(identity))

    def start(self, dockerfile: str, **more: str) -> subprocess.Popen[str]:
        """Build ``dockerfile``; the order's other fields are ``more``."""
        (self.context / "Dockerfile").write_text(dockerfile)
        with code_archive.packed(code_survey.survey(self.context)) as code:
            code_archive.upload(self.store, code)
        options = tuple(containers.build_options())
        fields = {"name": "" if "push" in more else "mine", **more}
        order = BuildOrder(code=code.digest, dockerfile="Dockerfile", options=options, **fields)
        command = [sys.executable, "-m", "gpuctl.bootstrap.containers.build", str(self.node)]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=self.env
        )
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(order).decode() + "\n")
        process.stdin.flush()
        return process

    def build(self, dockerfile: str, **more: str) -> tuple[int, str]:
        """The exit code, and what was printed. Its standard input stays open, as a terminal's does."""
        with self.start(dockerfile, **more) as process:
            assert process.stdout is not None
            said = process.stdout.read()
            return process.wait(PATIENCE_S), said

    def left(self) -> list[str]:
        """What there is of builds on this node, on disk and in Podman."""
        program = containers.runtime()
        external = ["--external"] if program.endswith("podman") else []
        running = containers.ask(program, "ps", "--all", "--quiet", *external).stdout.split()
        names = containers.ask(program, "images", "--format", "{{.Repository}}:{{.Tag}}").stdout.split()
        folders = [path.name for path in self.node.glob("image-build-*")]
        return [*running, *(name for name in names if ":building-" in name), *folders]


@pytest.fixture
def builder(tmp_path: Path) -> Builder:
    return Builder(tmp_path)


def test_it_is_in_the_bucket_and_on_this_node_under_its_own_name(builder: Builder) -> None:
    before = builder.left()
    code, said = builder.build(f"FROM {containers.IMAGE}\nRUN echo built > /built\n")
    assert code == 0, said
    pinned = images.pinned(builder.store, "bucket:mine")
    name = images.local_name(pinned)
    try:
        (listed,) = images.listed(builder.store)
        assert (listed.name, listed.image.node) == ("mine", "node-0")
        assert len(listed.image.layers) == 2
        assert containers.ask(containers.runtime(), "image", "inspect", name).returncode == 0
        assert builder.left() == before
        code, said = builder.build(f"FROM {containers.IMAGE}\nRUN echo built > /built\n")
        assert code == 0 and "sending layer" not in said, "it is the same one"
    finally:
        containers.ask(containers.runtime(), "rmi", name)


def test_one_that_fails_says_where_and_leaves_nothing(builder: Builder) -> None:
    before = builder.left()
    code, said = builder.build(f"FROM {containers.IMAGE}\nRUN echo this is why; exit 3\n")
    assert code == 1
    assert "this is why" in said
    assert said.splitlines()[-1].startswith("error: the build failed on node-0 (exit ")
    assert images.listed(builder.store) == []
    assert builder.left() == before


@pytest.mark.parametrize("way", ["the connection ends", "SIGTERM"])
def test_one_that_nobody_waits_for_ends_with_all_that_it_runs(builder: Builder, way: str) -> None:
    before = builder.left()
    with builder.start(f"FROM {containers.IMAGE}\nRUN echo begun; sleep 86398\n") as process:
        assert process.stdout is not None and process.stdin is not None
        for line in process.stdout:
            if line.strip() == "begun":
                break
        process.stdin.close() if way == "the connection ends" else process.terminate()
        said = process.stdout.read()
        assert process.wait(PATIENCE_S) == 1
    assert said.splitlines()[-1] == "error: the build was given up; run it again"
    until(lambda: "sleep 86398" not in containers.ask("ps", "-eo", "args").stdout, "the step's process to end")
    assert builder.left() == before


def test_what_a_killed_one_left_on_the_disk_goes_with_the_next(builder: Builder) -> None:
    with builder.start(f"FROM {containers.IMAGE}\nRUN echo begun; sleep 2\n") as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.strip() == "begun":
                break
        (folder,) = builder.node.glob("image-build-*")
        process.kill()
    assert folder.is_dir()
    builder.build("FROM nothing-that-there-is:1\n")
    assert not folder.exists()


def test_the_name_of_a_killed_one_goes_with_the_next(builder: Builder) -> None:
    """One that was killed when its image was there already."""
    program, ended = containers.runtime(), subprocess.Popen(["true"])
    ended.wait()
    left = f"{images.REPOSITORY}/mine:building-{ended.pid}-01234567"
    going_on = f"{images.REPOSITORY}/mine:building-{os.getpid()}-01234567"
    for name in (left, going_on):
        assert containers.ask(program, "tag", containers.IMAGE, name).returncode == 0
    try:
        assert builder.build(f"FROM {containers.IMAGE}\nRUN true\n")[0] == 0
        there = builder.left()
        assert left not in there and going_on in there
    finally:
        containers.ask(program, "rmi", going_on)


def test_one_is_pushed_to_a_registry_and_the_bucket_keeps_nothing(builder: Builder, tmp_path: Path) -> None:
    gate = threading.Event()
    gate.set()
    with containers.registry(gate) as image:
        trusting = containers.trusting(tmp_path, image)
        builder.env.update(trusting)
        pushed = image.replace("tiny:1", "team/mine:2")
        code, said = builder.build(f"FROM {containers.IMAGE}\nRUN echo built > /built\n", push=pushed)
        assert code == 0, said
        assert images.listed(builder.store) == []
        containers.ask(containers.runtime(), "rmi", pushed)
        told: list[str] = []
        node = Containers(builder.node, builder.store, {}, {**os.environ, **trusting}, False, told.append, lambda: None)
        node.fetch(pushed)
        assert told[-1].startswith(f"pulled {pushed} in ")
        containers.ask(containers.runtime(), "rmi", pushed)


def test_without_docker_and_podman_the_answer_is_one_line(builder: Builder, tmp_path: Path) -> None:
    builder.env["PATH"] = str(tmp_path)
    assert builder.build("FROM scratch\n") == (
        1,
        "error: neither Docker nor Podman is installed on this node; fix or install one, or train without --image\n",
    )
