"""How a job ends, and what is told of it."""

from __future__ import annotations

import os
import re
import time

import pytest

from gpuctl.cluster.errors import CHECKPOINT_LOST
from gpuctl.cluster.jobs import queue
from tests.e2e.machine import Cluster, as_json
from tests.e2e.scripts import REFUSED

DIES = """
    import faulthandler, os, sys
    faulthandler.enable()
    print("soon", flush=True)
    def dies():
        os.kill(os.getpid(), int(sys.argv[1]))
    dies()
"""
HANGS = """
    import os, signal, sys, threading
    if os.environ["RANK"] == "1":
        sys.exit(0)
    if "deaf" in sys.argv:
        signal.signal(signal.SIGTERM, lambda *_: None)
    print("hangs", flush=True)
    while True:
        threading.Event().wait(1000)
"""


@pytest.mark.slow
def test_a_training_whose_last_checkpoint_is_lost_fails_with_a_code_of_its_own(cluster: Cluster) -> None:
    cluster.up("1")
    script = cluster.write("refused.py", REFUSED)
    why = "the checkpoint of step 1 was not written: the bucket refuses it"
    done = cluster.run("train", script, code=CHECKPOINT_LOST)
    assert f"the last checkpoint is lost: {why}" in done.stderr
    done = cluster.run("train", script, "--", "waits", code=CHECKPOINT_LOST)
    assert why in done.stderr and "Traceback" in done.stdout
    cluster.run("logs", "-f", "refused-2", code=CHECKPOINT_LOST)
    cluster.run("train", script, "--", "again")
    listed = as_json(cluster.run("jobs", "-o", "json"))
    assert (listed[-1]["state"], listed[-1]["step"]) == ("succeeded", 2), "the step is known without log_metrics"


@pytest.mark.slow
def test_a_worker_that_a_signal_ends_is_told_with_its_name_and_what_would_have_gone_on(cluster: Cluster) -> None:
    cluster.up("1")
    script = cluster.write("dies.py", DIES)
    done = cluster.run("train", script, "--", "11", code=139)
    last = done.stderr.splitlines()[-1]
    assert "rank 0 on node-0 was killed by SIGSEGV: Fatal Python error: Segmentation fault" in last
    assert "--max-restarts N would have started it again" in last
    assert "line 6 in dies" in done.stderr and "run_script" not in done.stdout + done.stderr
    done = cluster.run("train", script, "--", "9", code=137)
    assert re.search(
        r"was killed by SIGKILL: not sent by gpuctl: out of memory, or by hand\?; "
        r"\d+\.\d of \d+\.\d GiB were in use",
        done.stderr.splitlines()[-1],
    )


@pytest.mark.slow
@pytest.mark.parametrize("how", ["", "deaf"])
def test_a_job_that_hangs_after_one_of_its_nodes_is_done_can_be_cancelled(cluster: Cluster, how: str) -> None:
    """Without a worker that could save, nobody waits for one; and with one, ``now`` does not."""
    cluster.up("2")
    job = cluster.train(cluster.write("hangs.py", HANGS), *(["--", how] if how else []))
    cluster.wait(lambda: "hangs" in cluster.run("logs", job).stdout, "the one that hangs")
    began = time.monotonic()
    queue.ask_to_cancel(cluster.bucket, job)
    if how:
        cluster.wait(lambda: (r := cluster.now(job)) and r.phase == "drain", "the job to drain")
        queue.ask_to_cancel(cluster.bucket, job, now=True)
    outcome = cluster.wait_for_end(job).outcome
    assert outcome is not None and outcome.result == "cancelled"
    assert time.monotonic() - began < 20


@pytest.mark.slow
@pytest.mark.parametrize("place", [("2",), ("1", "--slots", "2")], ids=["of another node", "of the same node"])
def test_a_rank_that_hangs_once_all_others_have_ended_is_named_with_its_stack(
    cluster: Cluster, place: tuple[str, ...]
) -> None:
    cluster.up(*place)
    done = cluster.run("train", cluster.write("hangs.py", HANGS), "--exit-timeout", "1", code=124)
    named = r"1 of 2 ranks have ended, and rank 0 on node-\d did nothing for 1 s \(--exit-timeout\)"
    assert re.search(named, done.stderr)
    assert re.search(r'hangs\.py", line 9 in <module>', done.stdout), done.stdout


@pytest.mark.slow
def test_a_node_keeps_the_files_of_the_newest_jobs_and_removes_others_after_a_day(cluster: Cluster) -> None:
    cluster.up("1")
    script = cluster.write("short.py", "print('short')\n")
    for _ in range(4):
        cluster.run("train", script)
    folder = cluster.node_dir("node-0") / "jobs"
    oldest = folder / "short-1"
    cluster.wait(lambda: (oldest / "ended").exists(), "the first job to be known as over")
    assert (oldest / "code" / "short.py").exists(), "a day has not passed"
    os.utime(oldest / "ended", (1e9, 1e9))
    cluster.run("train", script)
    cluster.wait(lambda: not oldest.exists(), "its files to be removed")
    assert sorted(path.name for path in folder.iterdir()) == [f"short-{n}" for n in (2, 3, 4, 5)]
