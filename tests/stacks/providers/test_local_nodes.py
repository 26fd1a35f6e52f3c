"""Nodes that are processes on this machine."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from gpuctl.cluster.storage.bucket import open_bucket
from gpuctl.stacks.providers import local_nodes, processes


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
