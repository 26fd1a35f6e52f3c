"""``gpuctl demo``, the README's first command."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gpuctl.stacks import processes
from tests.e2e.machine import Cluster


@pytest.mark.timeout(360)
def test_the_demo_keeps_its_promises_and_leaves_nothing(cluster: Cluster, tmp_path: Path) -> None:
    picture = tmp_path / "demo.png"
    done = cluster.run("demo", "--steps", "1000", "--picture", str(picture), timeout=300)
    last = done.stdout.splitlines()[-1]
    said = re.fullmatch(
        r"demo: ok accuracy=(0\.\d+) undisturbed=(0\.\d+) steps_redone_notice=0 steps_redone_kill=(\d+)"
        r" resume_s_notice=(\d+\.\d+) resume_s_kill=(\d+\.\d+)",
        last,
    )
    assert said, last
    assert float(said[1]) > 0.97 and abs(float(said[1]) - float(said[2])) <= 0.01
    assert int(said[3]) <= 100
    assert "given notice" in done.stdout and "lost" in done.stdout and "joined" in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert processes.marked_processes(cluster.state) == []
    assert not (cluster.state / "clusters" / "demo.json").exists()
