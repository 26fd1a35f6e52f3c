"""Nodes that are processes on this machine."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from gpuctl.bootstrap.identity import NodeIdentity
from gpuctl.cluster.errors import GpuctlError
from gpuctl.cluster.records.clusters import ClusterSpec
from gpuctl.cluster.storage.bucket import open_bucket
from gpuctl.stacks.providers import local_nodes, processes
from tests.fakes.small_disk import fill, mounted


def test_an_agent_that_starts_is_the_only_one_of_its_node(tmp_path: Path) -> None:
    """Whatever has become of the note of an earlier one."""
    folder = tmp_path / "node-0"
    folder.mkdir()
    (tmp_path / "a_sleeper.py").write_text("import time; time.sleep(600)")
    try:
        noted = processes.start(folder, "a_sleeper", [], {**os.environ, "PYTHONPATH": str(tmp_path)}, "log")
        earlier = psutil.Process(noted.pid)
        (folder / "process.json").unlink()
        local_nodes.start_agent(folder, open_bucket((tmp_path / "bucket").as_uri()))
        assert not processes.lives(earlier)
    finally:
        assert processes.kill_all(folder) == []


def test_a_node_that_a_full_disk_left_half_made_is_made_by_the_next_up(tmp_path: Path) -> None:
    spec = ClusterSpec(name="c", provider="local", nodes_min=1, nodes_max=1)
    with mounted(tmp_path / "disk", "1m") as disk:
        folder = disk / "node-0"
        folder.mkdir()
        ballast = fill(disk)
        with pytest.raises(OSError, match="No space left") as refused:
            local_nodes.write_identities([folder], "file:///b", spec, 0, beside=[])
        assert refused.value.filename == str(folder / "identity.json")
        ballast.unlink()
        assert local_nodes.may_restart(folder)
        local_nodes.write_identities([folder], "file:///b", spec, 0, beside=[])
        assert NodeIdentity.read(folder).node == "node-0"


def test_a_node_that_could_not_even_say_that_its_disk_is_full(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "1m") as disk:
        (disk / "agent.log").touch()
        fill(disk)
        with pytest.raises(GpuctlError, match=rf"disk did not start: no space left on the disk that holds {disk};"):
            local_nodes.wait_until_live([disk], open_bucket((tmp_path / "bucket").as_uri()))
