"""``gpuctl demo``, the README's first command."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from gpuctl.stacks.providers import processes
from tests.e2e.machine import Cluster


@pytest.mark.slow
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
    assert "given notice" in done.stdout and "lost" in done.stdout
    assert len(re.findall(r"node-\d+ joined$", done.stdout, re.MULTILINE)) == 2, "however fast the steps are"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert processes.marked_processes(cluster.state) == []
    assert [*(cluster.state / "clusters").iterdir(), *(cluster.state / "buckets").iterdir()] == []


@pytest.mark.slow
def test_a_demo_that_is_ended_leaves_nothing_and_touches_no_cluster_of_the_user(cluster: Cluster) -> None:
    cluster.run("up", "--nodes", "1", "--cluster", "demo")
    own = {process.pid for process in processes.marked_processes(cluster.state)}
    demo = cluster.start("demo")
    assert demo.stdout is not None
    assert any("four nodes are up" in line for line in demo.stdout)
    assert len(processes.marked_processes(cluster.state)) >= 5
    demo.send_signal(signal.SIGTERM)
    said = demo.stdout.read()
    assert demo.wait(60) == 143
    assert said.splitlines()[-1] == "terminated"
    assert {process.pid for process in processes.marked_processes(cluster.state)} == own
    assert [path.name for path in (cluster.state / "clusters").iterdir()] == ["demo.json"]
    assert [path.name for path in (cluster.state / "buckets").iterdir()] == ["demo"]
    assert "1 of 1 nodes live" in cluster.run("status", "--cluster", "demo").stdout


@pytest.mark.parametrize(
    ("picture", "said"),
    [
        ("nowhere/x.png", "folder nowhere does not exist"),
        ("x.doc", "is not a picture format; end its name in one of: .png, .svg, .pdf"),
        ("folder.png", "cannot be written"),
    ],
)
def test_a_picture_that_cannot_be_written_is_refused_before_the_demo(cluster: Cluster, picture: str, said: str) -> None:
    (cluster.folder / "folder.png").mkdir()
    assert said in cluster.run("demo", "--picture", picture, code=2).stderr
    assert not cluster.state.exists()
