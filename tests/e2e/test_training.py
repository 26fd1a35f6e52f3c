"""Jobs through the command line on local nodes, undisturbed."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess

import psutil
import pytest

from gpuctl.stacks.providers import processes
from tests.e2e.machine import Cluster, as_json, as_json_lines
from tests.e2e.scripts import COUNTING, PLAIN_DDP, Gate
from tests.waiting import PATIENCE_S


def test_a_plain_ddp_script_runs_unchanged(cluster: Cluster) -> None:
    cluster.up("2", "--slots", "2")
    done = cluster.run("train", cluster.write("plain.py", PLAIN_DDP), "--", "--lr", "0.1")
    envs = re.findall(r"env (.*)", done.stdout)
    assert len(envs) == 4
    seen = [dict(pair.split("=") for pair in env.split()) for env in envs]
    assert sorted(int(env["RANK"]) for env in seen) == [0, 1, 2, 3]
    assert {env["WORLD_SIZE"] for env in seen} == {"4"} and {env["LOCAL_WORLD_SIZE"] for env in seen} == {"2"}
    assert all(int(env["RANK"]) == 2 * int(env["GROUP_RANK"]) + int(env["LOCAL_RANK"]) for env in seen)
    assert {env["GPUCTL_JOB"] for env in seen} == {"plain-1"} and {env["GPUCTL_ROUND"] for env in seen} == {"1"}
    assert done.stdout.count("argv ['--lr', '0.1'] cwd True name __main__") == 4
    assert re.search(r"node-\d/\d+", done.stdout)


def test_two_jobs_in_line_run_one_after_the_other(cluster: Cluster) -> None:
    cluster.up("2")
    script = cluster.write("count.py", COUNTING)
    gate = Gate(cluster, 10)
    first = cluster.train(script, "--", "--steps", "20", *gate.args)
    second = cluster.train(script, "--", "--steps", "5")
    cluster.wait_for_step(first, 1)
    assert (waiting := cluster.now(second)) is None or waiting.number == 0
    listed = {job["job"]: job for job in as_json(cluster.run("jobs", "-o", "json"))}
    assert listed[first]["state"] == "running" and listed[second]["state"] == "queued"
    gate.open()
    ended = [cluster.wait_for_end(first), cluster.wait_for_end(second)]
    assert [r.outcome.result for r in ended if r.outcome] == ["succeeded", "succeeded"]
    began = cluster.history(second)[0].at
    assert began >= ended[0].at


@pytest.mark.slow
def test_jobs_of_half_the_nodes_run_side_by_side(cluster: Cluster) -> None:
    cluster.up("2")
    script = cluster.write("count.py", COUNTING)
    first = cluster.train(script, "--nodes", "1", "--", "--steps", "100000")
    second = cluster.train(script, "--nodes", "1", "--", "--steps", "5")
    cluster.wait_for_end(second)
    assert (now := cluster.now(first)) and now.phase == "run"
    cluster.run("cancel", first)
    assert (outcome := cluster.wait_for_end(first).outcome) and outcome.result == "cancelled"


def test_a_script_that_fails_is_restarted_as_told_and_then_the_job_fails_with_its_code(cluster: Cluster) -> None:
    cluster.up("2")
    script = cluster.write(
        "bad.py",
        """
        import os, sys
        import torch.distributed as dist
        dist.init_process_group("gloo")
        dist.barrier()
        if os.environ["RANK"] == "1":
            print("about to fail", flush=True)
            sys.exit(3)
        dist.barrier()
        """,
    )
    done = cluster.run("train", script, "--max-restarts", "1", code=3)
    assert done.stdout.count("about to fail") == 2
    assert "rank 1" in done.stderr and "code 3" in done.stderr
    history = cluster.history("bad-1")
    assert history[-1].failures == 2 and {r.number for r in history if r.phase == "run"} == {1, 2}


def test_the_traceback_of_the_first_failing_rank_is_shown(cluster: Cluster) -> None:
    cluster.up("2")
    script = cluster.write(
        "raises.py",
        """
        import os
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        dist.barrier()

        def learn():
            raise ValueError("the labels are wrong")

        if os.environ["RANK"] == "1":
            learn()
        dist.barrier()
        """,
    )
    done = cluster.run("train", script, code=1)
    assert "ValueError: the labels are wrong" in done.stderr
    assert 'raises.py", line' in done.stderr and "in learn" in done.stderr
    assert "runpy" not in done.stderr and "Traceback (most recent call last)" in done.stderr


@pytest.mark.slow
def test_ctrl_c_leaves_the_job_running_and_says_how_to_come_back(cluster: Cluster) -> None:
    cluster.up("1")
    script = cluster.write("count.py", COUNTING)
    gate = Gate(cluster, 10)
    process = cluster.start("train", script, "--", "--steps", "20", *gate.args)
    job = cluster.wait(cluster.newest_job, "the job")
    assert job is not None
    cluster.wait_for_step(job, 5)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    gate.open()
    assert f"gpuctl logs -f {job}" in said and "Traceback" not in said
    followed = cluster.run("logs", "-f", job)
    assert "finished 20" in followed.stdout
    assert (outcome := cluster.wait_for_end(job).outcome) and outcome.result == "succeeded"


@pytest.mark.slow
def test_a_variable_that_only_a_new_interpreter_can_have_is_honoured(cluster: Cluster) -> None:
    cluster.up("2")
    script = cluster.write("hashes.py", "import os\nprint('hash', hash('gpuctl'), os.environ['PYTHONHASHSEED'])\n")
    done = cluster.run("train", script, "--env", "PYTHONHASHSEED=7")
    hashes = re.findall(r"hash (-?\d+) 7", done.stdout)
    assert len(hashes) == 2 and len(set(hashes)) == 1


@pytest.mark.slow
def test_logs_can_be_asked_for_by_node_rank_and_round(cluster: Cluster) -> None:
    cluster.up("2")
    cluster.run("train", cluster.write("plain.py", PLAIN_DDP))
    everything = as_json_lines(cluster.run("logs", "plain-1", "-o", "json"))
    assert {line["rank"] for line in everything} == {0, 1}
    assert {line["rank"] for line in as_json_lines(cluster.run("logs", "plain-1", "--rank", "1", "-o", "json"))} == {1}
    node = everything[0]["node"]
    assert {line["node"] for line in as_json_lines(cluster.run("logs", "plain-1", "--node", node, "-o", "json"))} == {
        node
    }
    assert "has no round 2; there are: 1" in cluster.run("logs", "plain-1", "--round", "2", code=2).stderr
    assert "to stderr" in cluster.run("logs", "plain-1").stdout


@pytest.mark.slow
def test_status_tells_nodes_rank_0_job_step_and_checkpoint(cluster: Cluster) -> None:
    cluster.up("2")
    job = cluster.train(cluster.write("count.py", COUNTING), "--", "--steps", "100000")
    cluster.wait(lambda: cluster.checkpoints(job).entries, "a checkpoint")
    status = as_json(cluster.run("status", "-o", "json"))
    assert {node["node"] for node in status["nodes"]} == {"node-0", "node-1"}
    assert status["rank0"] == cluster.rank0()
    cluster.run("cancel", job)
    assert (outcome := cluster.wait_for_end(job).outcome) and outcome.result == "cancelled"
    shown = cluster.run("status")
    assert "node-0" in shown.stdout


@pytest.mark.slow
@pytest.mark.parametrize("env", ["X=1", "PYTHONHASHSEED=1"], ids=["warm", "fresh"])
def test_what_a_script_left_in_a_session_of_its_own_ends_with_the_job_and_nothing_else_does(
    cluster: Cluster, env: str
) -> None:
    """It would hold a GPU while the next job runs."""
    cluster.up("1")
    mine = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    try:
        left = cluster.write("left.py", 'import subprocess\nprint(subprocess.Popen(["setsid", "sleep", "1000"]).pid)\n')
        done = cluster.run("train", "--env", env, left)
        with contextlib.suppress(psutil.NoSuchProcess):
            assert not processes.lives(psutil.Process(int(done.stdout.split()[-1])))
        assert mine.poll() is None
    finally:
        mine.kill()
        mine.wait()
