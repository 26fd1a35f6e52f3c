"""``status`` and ``jobs``, on records as agents write them."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from itertools import takewhile
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpuctl.cli.render.terminal import size
from gpuctl.cluster import layout
from gpuctl.cluster.checkpoints import listing
from gpuctl.cluster.jobs import queue
from gpuctl.cluster.records.checkpoints import CheckpointEntry
from gpuctl.cluster.records.jobs import CancelRequest
from gpuctl.cluster.records.nodes import PreemptionNotice
from gpuctl.cluster.records.rounds import JobOutcome
from gpuctl.stacks.providers.processes import ProcessRecord
from tests.fakes.written_cluster import WrittenCluster, progress


def state_of(cluster: WrittenCluster) -> dict[str, Any]:
    text = cluster.run("status", "-o", "json").stdout
    assert "secret" not in text, "the cluster's token is nobody's business"
    state: dict[str, Any] = json.loads(text)
    return state


def kept(cluster: WrittenCluster, job: str) -> CheckpointEntry:
    return listing.committed(cluster.store, job)[-1]


def running(cluster: WrittenCluster) -> str:
    """Three nodes, one of them lost; job 1 in round 2 on two of them at step 412."""
    job = cluster.submit(args=("--lr", "0.1")).job
    cluster.round(job, 1, ("node-0", "node-1", "node-2"))
    cluster.round(job, 2, ("node-1", "node-2"), reason="node-0 lost")
    cluster.beat("node-0")
    view = {"node-0": "lost", "node-1": "live", "node-2": "leaving"}
    cluster.lead("node-1", view=view, rounds={job: 2}, line=1, progress=progress(job, 412, 2, loss=0.25))
    cluster.beat("node-2", progress=progress(job, 411, 2), notice=PreemptionNotice(lead_s=30, at=time.time()))
    cluster.metrics(job, 1, "node-0", {"step": 300, "loss": 0.5})
    cluster.checkpoint(job, 400, {"index.json": b"x" * 1500}, 2)
    return job


def test_status_tells_nodes_rank_0_job_round_step_loss_rate_and_checkpoint(written_anywhere: WrittenCluster) -> None:
    job = running(written_anywhere)
    state = state_of(written_anywhere)
    assert (state["cluster"], state["rank0"], state["epoch"]) == ("default", "node-1", 1)
    nodes = {node["node"]: node for node in state["nodes"]}
    assert {name: node["state"] for name, node in nodes.items()} == {
        "node-0": "lost",
        "node-1": "live",
        "node-2": "leaving",
    }
    assert (nodes["node-0"]["job"], nodes["node-0"]["rank"]) == (None, None)
    assert (nodes["node-2"]["job"], nodes["node-2"]["rank"], nodes["node-2"]["step"]) == (job, 1, 411)
    (shown,) = state["jobs"]
    assert (shown["job"], shown["state"], shown["round"], shown["nodes"]) == (job, "running", 2, 2)
    assert (shown["step"], shown["loss"], shown["steps_per_s"]) == (412, 0.25, 10.0)
    assert (shown["checkpoint"]["step"], shown["checkpoint"]["bytes"]) == (400, kept(written_anywhere, job).bytes)
    assert shown["reason"] == "node-0 lost"


def test_status_for_a_person_fits_80_columns(written: WrittenCluster) -> None:
    job = running(written)
    lines = written.run("status").stdout.splitlines()
    assert lines[0] == "default  local, 2 of 2 to 3 nodes live, rank 0 is node-1 (epoch 1)"
    seen = rf"node-1  live     127\.0\.0\.1  {job}     0   412  0\.25       10  \d+ s ago"
    assert any(re.fullmatch(seen, line) for line in lines), "however long the command took to begin"
    kept_size = size(kept(written, job).bytes)
    assert any(
        line.startswith(f"{job}  running      2      2   412  0.25       10  step 400, {kept_size}, ") for line in lines
    )
    assert lines[-1] == f"{job}: node-0 lost"
    assert max(len(line) for line in lines if not line.startswith("file:")) <= 80


def test_what_keeps_a_node_from_being_ready_is_said(written: WrittenCluster) -> None:
    written.lead("node-0", view={"node-0": "live"}, doing="pulling debian:12")
    assert "node-0: pulling debian:12" in written.run("status").stdout.splitlines()
    assert state_of(written)["nodes"][0]["doing"] == "pulling debian:12"


@pytest.mark.slow
def test_no_node_and_no_job_are_told_as_such(written: WrittenCluster) -> None:
    assert written.run("status").stdout.splitlines()[-3:] == [
        "no node has reported yet; start some with: gpuctl up",
        "",
        "no jobs yet; start one with: gpuctl train script.py",
    ]
    state = state_of(written)
    assert (state["nodes"], state["jobs"], state["rank0"]) == ([], [], None)
    done = written.run("jobs")
    assert (done.stdout, done.stderr) == ("", "no jobs yet; start one with: gpuctl train script.py\n")


def test_a_folder_without_a_cluster_is_no_cluster_without_jobs(written: WrittenCluster, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    done = written.run("jobs", "--bucket", (tmp_path / "empty").as_uri(), code=2)
    assert done.stderr == "error: there is no cluster in this bucket; create one with `gpuctl up`\n"


def test_where_rank_0_is_quiet_the_heartbeats_ages_count(written: WrittenCluster) -> None:
    written.lead("node-0", view={"node-0": "live", "node-1": "live", "node-2": "live"})
    written.beat("node-1")
    written.beat("node-2", notice=PreemptionNotice(lead_s=30, at=0.0))
    old = time.time() - 60
    folder = Path(written.url.removeprefix("file://"))
    for node in ("node-0",):
        os.utime(folder / layout.node(node), (old, old))
    nodes = {node["node"]: node["state"] for node in state_of(written)["nodes"]}
    assert nodes == {"node-0": "silent", "node-1": "live", "node-2": "leaving"}


def _restarted(cluster: WrittenCluster, *nodes: str) -> None:
    """These nodes were processes of this machine, before it was restarted a minute ago."""
    old = time.time() - 60
    for node in nodes:
        folder = cluster.home / "state" / "local" / "default" / "nodes" / node
        folder.mkdir(parents=True)
        noted = ProcessRecord(pid=os.getpid(), boot="another", start=0.0)
        (folder / "process.json").write_bytes(msgspec.json.encode(noted))
        os.utime(Path(cluster.url.removeprefix("file://")) / layout.node(node), (old, old))


@pytest.mark.slow
def test_after_a_restart_of_this_machine_it_is_told_what_is_gone_and_what_brings_it_back(
    written: WrittenCluster,
) -> None:
    job, waiting = written.submit().job, written.submit().job
    written.round(job, 1, ("node-0", "node-1"))
    written.checkpoint(job, 50, {"index.json": b"x"})
    written.lead("node-0", view={"node-0": "live", "node-1": "live"}, rounds={job: 1}, line=1)
    written.beat("node-1")
    _restarted(written, "node-0", "node-1")
    again = "2 of 2 nodes have ended (this machine was restarted); `gpuctl up` starts them again"
    lines = written.run("status").stdout.splitlines()
    assert lines[0].endswith("0 of 2 to 3 nodes live, no rank 0")
    assert lines[2] == f"{again}, and {job} goes on from step 50"
    state = state_of(written)
    assert (state["trouble"], state["rank0"]) == (lines[2], None)
    assert {node["node"]: node["state"] for node in state["nodes"]} == {"node-0": "ended", "node-1": "ended"}
    (written.work / "digits.py").touch()
    assert f"warning: {again}\n" in written.run("train", "-d", "digits.py").stderr
    for verb in (["preempt", "node-0"], ["exec", "node-0", "--", "true"]):
        process = written.start(*verb)
        assert "; none runs" in process.communicate(timeout=60)[1]
    assert waiting in written.run("jobs").stdout


@pytest.mark.slow
def test_who_follows_a_job_is_told_that_this_machine_was_restarted(written: WrittenCluster) -> None:
    job = written.submit().job
    written.round(job, 1, ("node-0",))
    written.lead("node-0", view={"node-0": "live"})
    _restarted(written, "node-0")
    following = written.start("logs", "-f", job)
    try:
        assert following.stderr
        said = next(line for line in following.stderr if "has reported" in line)
    finally:
        following.kill()
        following.communicate()
    assert said == (
        "· no node has reported for a while; 1 of 1 node has ended (this machine was restarted);"
        " `gpuctl up` starts it again\n"
    )


def test_a_node_lives_from_its_first_heartbeat_on_if_that_was_just_now(written: WrittenCluster) -> None:
    """Rank 0, which trusts no clock, waits for the second one."""
    written.lead("node-0", view={"node-0": "live", "node-1": "new", "node-2": "new"})
    written.beat("node-1")
    written.beat("node-2")
    old = time.time() - 60
    os.utime(Path(written.url.removeprefix("file://")) / layout.node("node-2"), (old, old))
    nodes = {node["node"]: node["state"] for node in state_of(written)["nodes"]}
    assert nodes == {"node-0": "live", "node-1": "live", "node-2": "new"}


def test_a_heartbeat_of_another_version_hides_no_other(written: WrittenCluster) -> None:
    written.lead("node-0", view={"node-0": "live"})
    written.store.put(layout.node("node-1"), b'{"node": 7}')
    assert [node["node"] for node in state_of(written)["nodes"]] == ["node-0"]


def test_waiting_and_cancelling_jobs_are_shown_beside_the_running_one(written: WrittenCluster) -> None:
    first = running(written)
    second, third = written.submit("other.py").job, written.submit("other.py").job
    queue.ask_to_cancel(written.store, third)
    shown = {job["job"]: job["state"] for job in state_of(written)["jobs"]}
    assert shown == {first: "running", second: "queued", third: "cancelling"}


def test_once_all_is_over_the_newest_job_is_shown_with_its_end(written: WrittenCluster) -> None:
    first, second = written.submit().job, written.submit().job
    written.lead("node-0", view={"node-0": "live"}, line=2, progress=progress(second, 9, 1))
    written.end(first, 1, JobOutcome(result="succeeded", exit_code=0))
    written.round(second, 1, ("node-0",))
    written.metrics(second, 1, "node-0", {"step": 99, "loss": 1.0}, {"step": 100, "loss": 0.125, "steps_per_s": 7.0})
    written.end(second, 1, JobOutcome(result="failed", exit_code=3, message="rank 0 on node-0 exited with code 3"))
    (shown,) = state_of(written)["jobs"]
    assert (shown["job"], shown["state"], shown["exit_code"]) == (second, "failed", 3)
    assert (shown["step"], shown["loss"], shown["steps_per_s"]) == (100, 0.125, None)
    assert shown["ended_at"] > 0
    assert written.run("status").stdout.splitlines()[-1] == f"{second}: rank 0 on node-0 exited with code 3"


def test_jobs_tells_how_far_each_is_and_how_fast(written: WrittenCluster) -> None:
    job = running(written)
    header, line = written.run("jobs").stdout.splitlines()
    assert header.split()[:7] == ["JOB", "STATE", "ROUND", "STEP", "LOSS", "STEPS/S", "CHECKPOINT"]
    assert line.split()[:8] == [job, "running", "2", "412", "0.25", "10", "step", "400"]


def test_jobs_lists_the_last_ones_with_the_newest_last(written_anywhere: WrittenCluster) -> None:
    cluster = written_anywhere
    names = [cluster.submit(args=(str(i),)).job for i in range(5)]
    cluster.end(names[3], 1, JobOutcome(result="cancelled", exit_code=130, message="cancelled"))
    listed = json.loads(cluster.run("jobs", "--last", "3", "-o", "json").stdout)
    assert [(job["job"], job["state"], job["exit_code"]) for job in listed] == [
        (names[2], "queued", None),
        (names[3], "cancelled", 130),
        (names[4], "queued", None),
    ]
    assert listed[0]["submitted_by"] == "ada@here"
    lines = cluster.run("jobs").stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["JOB", *names]
    assert lines[-1].endswith("digits.py 4")


@pytest.mark.slow
def test_a_node_that_is_ill_is_named_with_what_is_wrong(written: WrittenCluster) -> None:
    written.beat("node-0", health="GPU 3: it has fallen off the bus (Xid 79)", stalled=True)
    lines = written.run("status").stdout.splitlines()
    (row,) = [line.split() for line in lines if line.startswith("node-0 ")]
    assert row[1] == "ill"
    assert "node-0: GPU 3: it has fallen off the bus (Xid 79)" in lines
    (node,) = json.loads(written.run("status", "-o", "json").stdout)["nodes"]
    assert node["health"] == "GPU 3: it has fallen off the bus (Xid 79)"


@pytest.mark.slow
def test_cancel_leaves_the_mark_and_says_what_is_over_already(written: WrittenCluster) -> None:
    first, second = written.submit().job, written.submit().job
    written.end(first, 1, JobOutcome(result="succeeded", exit_code=0))
    assert written.run("cancel", first).stdout == f"job {first} has already ended: succeeded\n"
    assert written.store.get(layout.cancel(first)) is None
    assert written.run("cancel", second).stdout == f"job {second} is being cancelled\n"
    assert queue.cancel_request(written.store, second) == CancelRequest()
    assert written.run("cancel", second, "--now").stdout == f"job {second} is being cancelled at once\n"
    assert queue.cancel_request(written.store, second) == CancelRequest(now=True)


@pytest.mark.parametrize("args", [["status"], ["jobs"], ["logs"], ["ckpt", "ls"]])
def test_a_corrupt_record_is_one_line(written: WrittenCluster, args: list[str]) -> None:
    written.submit()
    written.store.put(f"{layout.QUEUE}/000000000002", b"{}")
    done = written.run(*args, code=1)
    assert done.stderr.startswith("error: queue/000000000002 is not a")
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_watch_without_a_terminal_prints_each_state(written: WrittenCluster) -> None:
    with written.start("status", "--watch") as process:
        assert process.stdout is not None
        heads = [*takewhile(lambda line: "no jobs yet" not in line, process.stdout)]
        written.beat("node-0")
        assert any(line.startswith("node-0 ") for line in process.stdout)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    assert any("no node has reported yet" in line for line in heads)
