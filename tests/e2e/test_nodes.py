"""The verbs that log in, on ``local`` nodes: the same words, on folders of this machine."""

from __future__ import annotations

import json
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.machine import Cluster
from tests.waiting import PATIENCE_S

WRITES_EVENTS = """
    import os
    from torch.utils.tensorboard import SummaryWriter
    with SummaryWriter(os.environ["GPUCTL_TENSORBOARD_DIR"]) as writer:
        for step in range(10):
            writer.add_scalar("loss", 1 / (step + 1), step)
"""


@pytest.mark.slow
def test_commands_and_copies_happen_in_a_nodes_folder(cluster: Cluster) -> None:
    cluster.up("2")
    rank0 = cluster.wait(lambda: [r.node for r in cluster.nodes().values() if r.view], "rank 0")[0]
    other = next(node for node in cluster.nodes() if node != rank0)
    done = cluster.run("exec", "--all", "--", "pwd; echo $OMP_NUM_THREADS >&2")
    folders = {node: f"{cluster.state}/local/default/nodes/{node}" for node in cluster.nodes()}
    assert sorted(done.stdout.splitlines()) == sorted(f"{node} | {folder}" for node, folder in folders.items())
    assert [line.split(" | ")[1].isdigit() for line in done.stderr.splitlines()] == [True, True]
    assert cluster.run("ssh", "1", "--", "pwd").stdout == f"{folders[other]}\n"
    assert cluster.run("exec", "--", "sh", "-c", "exit 9", code=9).stdout == ""

    (cluster.folder / "data").mkdir()
    cluster.write("data/part", "1")
    cluster.run("cp", "data", f"{other}:.")
    assert (Path(folders[other]) / "data" / "part").read_text() == "1"
    cluster.run("cp", f"{other}:data/", "back")
    assert (cluster.folder / "back" / "part").read_text() == "1"

    assert cluster.run("forward", "8000").stdout == f"http://{cluster.nodes()[rank0].address}:8000\n"
    assert not (cluster.state / "ssh").exists()
    assert "unknown node 'node-9'; there are: 0 " in cluster.run("ssh", "node-9", code=2).stderr


@pytest.mark.slow
def test_tensorboard_shows_a_job_and_ends_with_the_verb(cluster: Cluster) -> None:
    cluster.up("1")
    job = cluster.train(cluster.write("events.py", WRITES_EVENTS))
    cluster.wait_for_end(job)
    later = cluster.train(cluster.write("nothing.py", "pass"))  # it has none
    cluster.wait_for_end(later)
    with _forwarded(cluster, "tensorboard") as (process, url):
        runs = cluster.wait(lambda: _read(f"{url}/data/runs"), "TensorBoard to find the run")
        assert runs == ["000001-node-0"]
        tags = _read(f"{url}/data/plugin/scalars/scalars?run=000001-node-0&tag=loss")
        assert len(tags) == 10
        assert _tensorboards(cluster)
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=PATIENCE_S)[1] == f"TensorBoard of {job}\nCtrl-C to stop\n"
        assert process.returncode == 0
    assert _tensorboards(cluster) == []


@contextmanager
def _forwarded(cluster: Cluster, what: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [*cluster.command, "forward", what]
    with subprocess.Popen(
        command,
        cwd=cluster.folder,
        env=cluster.env,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def _read(url: str) -> list[str]:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=PATIENCE_S) as answer:
        found: list[str] = json.load(answer)
        return found


def _tensorboards(cluster: Cluster) -> list[str]:
    from gpuctl.stacks.providers.processes import marked_processes

    words = [word for process in marked_processes(cluster.state / "local") for word in process.cmdline()]
    return [word for word in words if word in ("tensorboard.main", "gpuctl.bootstrap.tensorboard")]
