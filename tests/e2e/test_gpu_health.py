"""A GPU that becomes ill while a job runs: the job saves and goes on without its node, and people are told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpuctl.cluster.records.rounds import Round
from tests.e2e.machine import Cluster
from tests.e2e.scripts import COUNTING
from tests.e2e.test_gpus import with_gpus
from tests.fakes.nvml import Driver

FELL = "GPU 1: it has fallen off the bus (Xid 79)"


def _second(cluster: Cluster, job: str) -> Round | None:
    now = cluster.now(job)
    return now if now and now.number == 2 else None


@pytest.mark.slow
def test_a_job_saves_and_goes_on_without_the_node_whose_gpu_is_ill(cluster: Cluster, tmp_path: Path) -> None:
    driver = Driver(tmp_path)
    with_gpus(cluster, tmp_path, 3)
    cluster.env.update(driver.env(cluster.env))
    cluster.up("2:3")
    script = cluster.write("count.py", COUNTING)
    job = cluster.train(script, "--", "--steps", "400", "--every", "100000", "--rest", "0.02")
    cluster.wait_for_step(job, 20)
    driver.say("xid 1 79")
    saved = cluster.wait(lambda: cluster.checkpoints(job).entries, "a last checkpoint")
    assert len(saved) == 1
    second = cluster.wait(lambda: _second(cluster, job), "the second round")
    assert sorted(member.node for member in second.members) == ["node-0", "node-2"]
    assert (second.failures, second.reason) == (0, f"node-1 is ill: {FELL}")
    (told,) = [
        node for node in json.loads(cluster.run("status", "-o", "json").stdout)["nodes"] if node["node"] == "node-1"
    ]
    assert told["health"] == FELL
    assert f"node-1: {FELL}" in cluster.run("status").stdout
    outcome = cluster.wait_for_end(job).outcome
    assert outcome and outcome.result == "succeeded", outcome
    done = [line["step"] for line in cluster.metrics(job) if "loss" in line]
    assert sorted(done) == sorted(set(done))


FAILS = """
    import os, sys, time
    from pathlib import Path
    told = Path(sys.argv[1])
    if os.environ["GPUCTL_NODE"] == "node-1":
        told.with_suffix(".new").write_text("xid 1 48\\n")
        told.with_suffix(".new").replace(told)
        sys.exit(1)
    if os.environ["GPUCTL_ROUND"] == "1":
        time.sleep(1000)
"""


@pytest.mark.slow
def test_a_worker_that_an_ill_gpu_ends_costs_no_restart(cluster: Cluster, tmp_path: Path) -> None:
    """The driver's word comes with the failure, or a moment after it."""
    driver = Driver(tmp_path)
    with_gpus(cluster, tmp_path, 2)
    cluster.env.update(driver.env(cluster.env))
    cluster.up("1:2")
    job = cluster.train(cluster.write("fails.py", FAILS), "--", cluster.env["NVML_SAYS"])
    ended = cluster.wait_for_end(job)
    assert ended.outcome and ended.outcome.result == "succeeded", ended.outcome
    assert (ended.failures, ended.number) == (0, 2)
    assert ended.reason == "node-1 is ill: GPU 1: an uncorrectable memory error (Xid 48)"
