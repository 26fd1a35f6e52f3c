"""JAX, TensorFlow and Horovod on a whole cluster: each trains for real, loses nodes, and leaves with notice.

They are installed in an environment of their own, by `make frameworks`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuctl.cluster.snapshots import snapshot_log
from gpuctl.stacks.providers import processes
from tests.e2e.machine import Cluster
from tests.paths import ROOT
from tests.waiting import PATIENCE_S, until

PYTHON = ROOT / "build" / "frameworks" / "bin" / "python"
FRAMEWORKS = ("jax", "tensorflow", "horovod")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="build/frameworks is not there: run `make frameworks`"),
]

HELD = """
    '''Runs another script, which stays where it has just written a checkpoint until the file `go` is there.'''
    import os, pathlib, runpy, sys, time
    replace = os.replace

    def replace_and_stay(*paths):
        replace(*paths)
        while not os.path.exists(os.environ["GO"]):
            time.sleep(0.02)

    os.replace = replace_and_stay
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture
def framed(cluster: Cluster) -> Iterator[Cluster]:
    """A cluster of two nodes whose Python has the frameworks."""
    cluster.command = [str(PYTHON), "-m", "gpuctl.cli.main"]
    cluster.write("held.py", HELD)
    for example in (ROOT / "examples" / "frameworks").glob("*.py"):
        shutil.copy(example, cluster.folder)
    yield cluster


def _start(cluster: Cluster, launcher: str, *options: str, steps: int = 300) -> str:
    go = f"GO={cluster.folder}/go"
    return cluster.train(
        "held.py", "--launcher", launcher, "-e", f"STEPS={steps}", "-e", go, *options, "--", f"{launcher}_circle.py"
    )


def _saved_in(cluster: Cluster, job: str, after: int = 0) -> int:
    """The first round after ``after`` that has a checkpoint in the bucket."""

    def found() -> int:
        newest = snapshot_log.newest(cluster.bucket, job)
        return newest.round if newest and newest.round > after else 0

    return cluster.wait(found, "a checkpoint in the bucket")


def _losses(cluster: Cluster, job: str) -> dict[str, str]:
    """By step, as rank 0 has printed them last."""
    return dict(re.findall(r"\| step (\d+) loss (\S+)", cluster.run("logs", job).stdout))


@pytest.mark.parametrize("launcher", FRAMEWORKS)
def test_it_goes_on_from_its_checkpoint_when_rank_0_is_lost_and_when_another_is(framed: Cluster, launcher: str) -> None:
    framed.up("2")
    job = _start(framed, launcher)
    first = _saved_in(framed, job)
    running = framed.now(job)
    assert running and running.number == first
    framed.run("preempt", running.members[0].node, "--notice", "0", "--replace-after", "0")
    second = _saved_in(framed, job, after=first)
    running = framed.now(job)
    assert running and running.number == second
    framed.run("preempt", running.members[1].node, "--notice", "0", "--replace-after", "0")
    framed.wait(lambda: (now := framed.now(job)) and now.number > second and now.phase == "run", "a third one")
    (framed.folder / "go").touch()
    ended = framed.wait_for_end(job)
    assert ended.outcome and ended.outcome.result == "succeeded", framed.run("logs", job).stdout
    printed = framed.run("logs", job).stdout
    assert sorted({int(step) for step in re.findall(r"begins after step (\d+)", printed)}) == [0, 50, 100]
    undisturbed = _start(framed, launcher)
    framed.wait_for_end(undisturbed)
    assert _losses(framed, job) == _losses(framed, undisturbed)


@pytest.mark.parametrize("launcher", FRAMEWORKS)
def test_a_notice_costs_no_step(framed: Cluster, launcher: str) -> None:
    framed.up("2")
    job = _start(framed, launcher)
    first = _saved_in(framed, job)
    running = framed.now(job)
    assert running
    with framed.notice(running.members[1].node, "--replace-after", "0"):
        framed.wait(lambda: (now := framed.now(job)) and now.phase == "drain", "the round to drain")
        (framed.folder / "go").touch()
        framed.wait(lambda: (now := framed.now(job)) and now.number > first and now.phase != "drain", "the next round")
    framed.wait_for_end(job)
    printed = framed.run("logs", job).stdout
    begun = [int(step) for step in re.findall(r"begins after step (\d+)", printed)]
    saved = [int(step) for step in re.findall(r"\| step (\d+) loss", printed)]
    (drained,) = {step for step in begun if step}
    assert 50 < drained <= 100 and drained in saved, "stopped at the step where they agreed to"
    assert saved[-1] == 300


def test_two_processes_a_node_are_four_ranks(framed: Cluster) -> None:
    framed.up("2")
    (framed.folder / "go").touch()
    for launcher in FRAMEWORKS:
        job = _start(framed, launcher, "--nproc", "2", steps=1)
        framed.wait_for_end(job)
        ranks = re.findall(r"rank (\d) of 4 begins", framed.run("logs", job).stdout)
        assert sorted(ranks) == ["0", "1", "2", "3"], launcher


RAISES = """
    import os, time
    {begin}
    if os.environ["RANK"] == "1":
        {how}
    time.sleep(600)
"""
BEGIN = {
    "jax": "import jax; jax.distributed.initialize()",
    "tensorflow": "import tensorflow as tf; tf.distribute.MultiWorkerMirroredStrategy()",
    "horovod": "import horovod.torch as hvd; hvd.init()",
}


@pytest.mark.parametrize("launcher", FRAMEWORKS)
def test_a_rank_that_raises_ends_the_job_with_its_own_words(framed: Cluster, launcher: str) -> None:
    """Without ``failing_exit`` it would wait at its end for the others, which wait for it."""
    framed.up("2")
    raises = 'raise RuntimeError("as a script does")'
    framed.write("raises.py", RAISES.format(begin=BEGIN[launcher], how=raises))
    done = framed.run("train", "--launcher", launcher, "raises.py", code=1, timeout=PATIENCE_S)
    assert "RuntimeError: as a script does" in done.stdout + done.stderr
    assert "rank 1" in done.stderr, done.stderr
    framed.write("leaves.py", RAISES.format(begin=BEGIN[launcher], how="raise SystemExit(3)"))
    done = framed.run("train", "--launcher", launcher, "leaves.py", code=3, timeout=PATIENCE_S)
    assert re.search(r"rank 1 on node-\d exited with code 3", done.stderr), done.stderr


@pytest.mark.parametrize("launcher", FRAMEWORKS)
def test_machines_without_a_cluster_go_on_with_another_one(tmp_path: Path, launcher: str) -> None:
    """``gpuctl mingle``; checkpoints are in a folder that all see."""
    for example in (ROOT / "examples" / "frameworks").glob("*.py"):
        shutil.copy(example, tmp_path)
    (tmp_path / "held.py").write_text(textwrap.dedent(HELD))
    (tmp_path / "checkpoints").mkdir()
    env = {**os.environ, "STEPS": "100", "GO": str(tmp_path / "go")}
    env |= {"GPUCTL_CHECKPOINT_DIR": str(tmp_path / "checkpoints")}
    asked = ["mingle", "--id", "exp1", "--nodes", "2", "--bucket", f"file://{tmp_path}/bucket", "--launcher", launcher]
    command = [str(PYTHON), "-m", "gpuctl.cli.main", *asked, "--", str(PYTHON), "held.py", f"{launcher}_circle.py"]
    machines: dict[str, subprocess.Popen[bytes]] = {}

    def start(name: str) -> None:
        marked = {**env, processes.MARK: str(tmp_path / name)}
        with (tmp_path / f"{name}.log").open("wb") as out:
            machines[name] = subprocess.Popen(
                command, cwd=tmp_path, env=marked, stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )

    try:
        start("first")
        start("second")
        until(lambda: [*(tmp_path / "checkpoints").glob(f"{launcher}_circle.[np][pt]*")], "a checkpoint")
        said = (tmp_path / "first.log").read_text()
        lost = "first" if "this is rank 0" in said else "second"
        processes.kill_all(tmp_path / lost)
        machines.pop(lost).wait()
        start("third")
        until(lambda: "this is rank" in (tmp_path / "third.log").read_text(), "the next round")
        (tmp_path / "go").touch()
        assert [one.wait(PATIENCE_S) for one in machines.values()] == [0, 0]
        printed = "".join((tmp_path / f"{name}.log").read_text() for name in machines)
        assert len(re.findall("begins after step 50", printed)) == 2, printed
        assert "step 100 loss" in printed
    finally:
        for name in machines:
            processes.kill_all(tmp_path / name)
