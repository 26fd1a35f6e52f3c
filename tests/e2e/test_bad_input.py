"""Bad input on a live cluster: one line that says what to do, an exit code, no traceback, nothing lost."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpuctl.stacks.providers import processes
from tests.e2e.machine import Cluster
from tests.e2e.scripts import COUNTING


def _refused(cluster: Cluster, *args: str, code: int = 2) -> str:
    done = cluster.run(*args, code=code)
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(lines) == 1, done.stderr
    return lines[0]


@pytest.mark.slow
def test_a_script_that_does_not_exist_or_does_not_compile_is_refused_before_anything_is_sent(cluster: Cluster) -> None:
    cluster.up("1")
    assert "missing.py" in _refused(cluster, "train", "missing.py")
    broken = cluster.write("broken.py", "print('fine')\ndef oops(:\n")
    assert "broken.py" in (said := _refused(cluster, "train", broken)) and "2" in said
    assert cluster.newest_job() is None


@pytest.mark.slow
@pytest.mark.parametrize("nodes", ["0", "4:2", "abc", "-1", "1:2:3", ""])
def test_a_number_of_nodes_that_is_none_is_refused(cluster: Cluster, nodes: str) -> None:
    said = _refused(cluster, "up", f"--nodes={nodes}")
    assert "nodes" in said
    assert not (cluster.state / "local").exists()


@pytest.mark.slow
def test_an_unknown_provider_is_refused_with_those_there_are(cluster: Cluster) -> None:
    assert "local" in _refused(cluster, "up", "--provider", "marsnet")


@pytest.mark.slow
def test_training_without_a_cluster_says_how_to_make_one(cluster: Cluster) -> None:
    assert "gpuctl up" in _refused(cluster, "train", cluster.write("count.py", COUNTING))


@pytest.mark.slow
def test_a_bucket_that_refuses_writes_is_named(cluster: Cluster, tmp_path: Path) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where a folder should be")
    said = _refused(cluster, "up", "--nodes", "1", "--bucket", f"file://{blocked}", code=1)
    assert str(blocked) in said
    assert processes.marked_processes(cluster.state) == []


@pytest.mark.slow
def test_a_corrupt_settings_file_is_refused_by_line_and_key(cluster: Cluster) -> None:
    cluster.write("gpuctl.yaml", "provider: local\nnodez: 4\n")
    said = _refused(cluster, "up")
    assert "gpuctl.yaml" in said and "2" in said and "nodez" in said and "nodes" in said


@pytest.mark.slow
def test_more_nodes_than_the_cluster_has_are_refused(cluster: Cluster) -> None:
    cluster.up("1")
    assert "at most 1" in _refused(cluster, "train", cluster.write("count.py", COUNTING), "--nodes", "2")


@pytest.mark.slow
def test_a_checkpoint_of_another_model_names_the_first_tensor_that_differs(cluster: Cluster, tmp_path: Path) -> None:
    cluster.up("1")
    kept = tmp_path / "kept"
    script = """
        import sys, torch
        from gpuctl import Checkpointer
        model = torch.nn.Sequential(torch.nn.Linear(3, int(sys.argv[1])), torch.nn.Linear(int(sys.argv[1]), 1))
        checkpointer = Checkpointer(sys.argv[2])
        print("restored", checkpointer.restore({"model": model}))
        checkpointer.save(1, {"model": model})
    """
    cluster.write("model.py", script)
    cluster.run("train", "model.py", "--", "4", str(kept))
    assert "restored 1" in cluster.run("train", "model.py", "--", "4", str(kept)).stdout
    done = cluster.run("train", "model.py", "--", "5", str(kept), code=1)
    assert "model.0.bias" in done.stderr or "model.0.weight" in done.stderr
    assert "4" in done.stderr and "5" in done.stderr


@pytest.mark.slow
def test_preempting_a_node_that_is_not_there_names_those_that_are(cluster: Cluster) -> None:
    cluster.up("1")
    assert "node-0" in _refused(cluster, "preempt", "node-7")


@pytest.mark.slow
def test_debug_shows_the_traceback_behind_the_line(cluster: Cluster) -> None:
    cluster.env["GPUCTL_DEBUG"] = "1"
    done = cluster.run("train", "missing.py", code=None)
    assert done.returncode != 0 and "Traceback" in done.stderr


def test_down_ends_every_process_keeps_the_checkpoints_and_may_be_repeated(cluster: Cluster) -> None:
    cluster.up("2")
    job = cluster.train(cluster.write("count.py", COUNTING), "--", "--steps", "100000")
    cluster.wait(lambda: cluster.checkpoints(job).entries, "a checkpoint")
    started = processes.marked_processes(cluster.state)
    assert len(started) >= 6
    done = cluster.run("down", "-y")
    assert processes.marked_processes(cluster.state) == []
    assert not any(processes.lives(process) for process in started)
    assert f"{cluster.state}/buckets/default" in done.stdout + done.stderr
    assert cluster.checkpoints(job).entries
    ended = cluster.now(job)
    assert ended is not None and ended.outcome is not None and ended.outcome.result == "cancelled"
    _refused(cluster, "down", "-y")


@pytest.mark.slow
def test_down_touches_no_process_that_up_did_not_start(cluster: Cluster) -> None:
    cluster.up("1")
    noted = cluster.node_dir("node-0") / "process.json"
    # The pid of this test, as if the agent's had been given to another process since.
    noted.write_bytes(noted.read_bytes().replace(b'"pid":', b'"was":', 1).replace(b"{", b'{"pid":%d,' % os.getpid(), 1))
    cluster.run("down", "-y")
    assert processes.marked_processes(cluster.state) == []
