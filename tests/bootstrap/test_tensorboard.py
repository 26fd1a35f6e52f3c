"""The event files that TensorBoard is shown: of all nodes and rounds from the bucket, this node's own from its disk."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from gpuctl.bootstrap.identity import NodeIdentity
from gpuctl.bootstrap.tensorboard import EventFiles
from gpuctl.cluster import layout
from gpuctl.cluster.storage.bucket import Bucket, open_bucket

NAME = "events.out.tfevents.1"


@pytest.fixture
def store(file_url: str) -> Bucket:
    return open_bucket(file_url)


def put(store: Bucket, run: str, data: bytes) -> None:
    store.put(f"{layout.tensorboard('job')}/{run}/{NAME}", data)


def test_files_grow_as_the_bucket_has_them(store: Bucket, tmp_path: Path) -> None:
    put(store, "000001-other", b"one")
    files = EventFiles(store, "job", "me", tmp_path / "rounds", tmp_path / "shown")
    files.refresh()
    shown = tmp_path / "shown" / "000001-other" / NAME
    before = shown.stat().st_ino
    put(store, "000001-other", b"one two")
    put(store, "000002-other", b"new")
    files.refresh()
    assert shown.read_bytes() == b"one two"
    assert shown.stat().st_ino == before, "TensorBoard would begin again"
    assert (tmp_path / "shown" / "000002-other" / NAME).read_bytes() == b"new"


def test_what_this_node_writes_right_now_comes_from_its_disk(store: Bucket, tmp_path: Path) -> None:
    put(store, "000001-me", b"what was sent so far")
    own = tmp_path / "rounds" / "000001" / "tensorboard"
    own.mkdir(parents=True)
    (own / NAME).write_bytes(b"what was sent so far, and more")
    files = EventFiles(store, "job", "me", tmp_path / "rounds", tmp_path / "shown")
    files.refresh()
    files.refresh()
    assert (tmp_path / "shown" / "000001-me" / NAME).read_bytes() == b"what was sent so far, and more"


@pytest.mark.slow
def test_ctrl_c_is_left_to_who_looks_and_the_end_of_standard_input_ends_it(store: Bucket, tmp_path: Path) -> None:
    """It is in the group of processes that the terminal interrupts."""
    (tmp_path / "identity.json").write_bytes(
        msgspec.json.encode(NodeIdentity(node="node-0", address="127.0.0.1", bucket=store.url))
    )
    command = [sys.executable, "-m", "gpuctl.bootstrap.tensorboard", str(tmp_path), "job"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdout
        assert re.match(r"port \d+", process.stdout.readline())
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (0, "")
