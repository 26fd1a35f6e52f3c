"""Nodes taken, killed, frozen and brought back while a job runs."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from gpuctl.stacks.providers import processes
from tests.e2e.machine import Cluster
from tests.e2e.scripts import COUNTING, Gate
from tests.waiting import PATIENCE_S


def _first_steps(cluster: Cluster, job: str) -> dict[int, int]:
    """Round to the first optimizer step made in it."""
    first: dict[int, int] = {}
    for record in cluster.metrics(job):
        first[record["round"]] = min(record["step"], first.get(record["round"], record["step"]))
    return first


def _succeeded(cluster: Cluster, job: str) -> None:
    outcome = cluster.wait_for_end(job).outcome
    assert outcome is not None and outcome.result == "succeeded", outcome


def test_weights_after_losing_and_regaining_nodes_are_those_of_an_undisturbed_run(
    cluster: Cluster, tmp_path: Path
) -> None:
    cluster.up("3")
    script = cluster.write("count.py", COUNTING)
    calm, rough = tmp_path / "calm.pt", tmp_path / "rough.pt"
    cluster.run("train", script, "--", "--steps", "300", "--rest", "0", "--out", str(calm))
    first, second = Gate(cluster, 70), Gate(cluster, 150)
    job = cluster.train(script, "--", "--steps", "300", "--out", str(rough), *first.args, *second.args)
    cluster.wait_for_step(job, 50)
    cluster.run("preempt", cluster.rank0(), "--notice", "0", "--replace-after", "0")
    again = cluster.wait(lambda: _running(cluster, job, 3), "three nodes again")
    first.open()
    cluster.wait_for_step(job, 120, number=again)
    now = cluster.now(job)
    assert now is not None
    other = next(member.node for member in now.members if member.node != cluster.rank0())
    with cluster.notice(other, "--replace-after", "0"):
        second.open()
    _succeeded(cluster, job)
    assert len({r.number for r in cluster.history(job) if r.phase == "run"}) == 3
    restores = [line for line in cluster.run("logs", job).stdout.splitlines() if " is restored: " in line]
    assert len(restores) >= 2 + 2, "by each node in each round"
    assert any("MB from this node" in line for line in restores)
    assert not any("from the bucket" in line for line in restores), "the nodes' disks have all of it"
    last = next(r for r in reversed(cluster.history(job)) if r.phase == "run")
    tiers = [cluster.node_dir(member.node) / "jobs" / job / "tier" for member in last.members]
    cluster.wait(lambda: not any(tier.exists() for tier in tiers), "a job that is over leaves no copies")
    weights, other_weights = torch.load(calm), torch.load(rough)
    assert weights.keys() == other_weights.keys()
    assert all(torch.equal(weights[name], other_weights[name]) for name in weights)


def _running(cluster: Cluster, job: str, nodes: int) -> int | None:
    now = cluster.now(job)
    return now.number if now and now.phase == "run" and len(now.members) == nodes and now.number > 1 else None


def test_a_notice_costs_no_step_and_a_kill_at_most_one_interval(cluster: Cluster) -> None:
    cluster.up("2:3")
    notice, kill = Gate(cluster, 45), Gate(cluster, 130)
    script = cluster.write("count.py", COUNTING)
    job = cluster.train(script, "--", "--steps", "180", "--every", "25", *notice.args, *kill.args)
    cluster.wait_for_step(job, 30)
    with cluster.notice(cluster.rank0(), "--replace-after", "never"):
        notice.open()
    cluster.wait_for_step(job, 110, number=2)
    before = cluster.step(job)
    cluster.run("preempt", cluster.rank0(), "--notice", "0", "--replace-after", "0")
    kill.open()
    _succeeded(cluster, job)
    first = _first_steps(cluster, job)
    assert first[2] == max(m["step"] for m in cluster.metrics(job) if m["round"] == 1) + 1
    # What rank 0 recorded in its last moments went with its node; how far it was just before is known.
    after_the_kill = first[min(r for r in first if r > 2)]
    assert after_the_kill > before - 25 and (after_the_kill - 1) % 25 == 0


@pytest.mark.slow
def test_a_node_killed_while_another_is_away_leaves_one_that_finishes(cluster: Cluster) -> None:
    cluster.up("1:3")
    gate = Gate(cluster, 50)
    job = cluster.train(cluster.write("count.py", COUNTING), "--", "--steps", "80", *gate.args)
    cluster.wait(lambda: cluster.checkpoints(job).entries, "the checkpoint of step 20")
    first = cluster.rank0()
    second = next(node for node in cluster.nodes() if node != first)
    cluster.kill(first)
    cluster.kill(second)
    gate.open()
    _succeeded(cluster, job)
    assert len(cluster.history(job)[-1].members) == 1
    assert max(_first_steps(cluster, job).values()) > 20


def test_all_nodes_killed_at_once_and_brought_back_go_on_from_the_last_checkpoint(cluster: Cluster) -> None:
    cluster.up("3")
    gate = Gate(cluster, 60)
    job = cluster.train(cluster.write("count.py", COUNTING), "--", "--steps", "80", "--every", "10", *gate.args)
    cluster.wait(lambda: cluster.checkpoints(job).entries, "a checkpoint")
    processes.kill_all(cluster.state / "local", PATIENCE_S)
    kept = cluster.checkpoints(job).entries[-1].step
    gate.open()
    cluster.up("3")
    _succeeded(cluster, job)
    first = _first_steps(cluster, job)
    assert first[max(first)] == kept + 1


@pytest.mark.slow
def test_after_a_restart_of_the_machine_status_names_what_is_gone_and_up_goes_on_with_it(cluster: Cluster) -> None:
    cluster.lease_s = 3.0
    cluster.up("2")
    gate = Gate(cluster, 60)
    script = cluster.write("count.py", COUNTING)
    job = cluster.train(script, "--", "--steps", "80", "--every", "10", *gate.args)
    waiting = cluster.train(script, "--", "--steps", "20")
    cluster.wait(lambda: cluster.checkpoints(job).entries, "a checkpoint")
    processes.kill_all(cluster.state / "local", PATIENCE_S)
    for node in ("node-0", "node-1"):
        note = cluster.node_dir(node) / "process.json"
        note.write_text(note.read_text().replace(processes.boot_id(), "an-earlier-boot"))
    kept = cluster.checkpoints(job).entries[-1].step
    said = (
        f"2 of 2 nodes have ended (this machine was restarted); `gpuctl up` starts them again, and {job} goes on from"
    )
    cluster.wait(lambda: f"{said} step {kept}" in cluster.run("status").stdout, "status to tell of it")
    gate.open()
    cluster.up("2")
    _succeeded(cluster, job)
    _succeeded(cluster, waiting)
    assert " ended" not in cluster.run("status").stdout


@pytest.mark.slow
def test_workers_do_not_outlive_their_agent(cluster: Cluster) -> None:
    cluster.up("1:2")
    gate = Gate(cluster, 40)
    job = cluster.train(cluster.write("count.py", COUNTING), "--", "--steps", "60", *gate.args)
    cluster.wait_for_step(job, 5)
    victim = cluster.rank0()
    agent = processes.noted_process(cluster.node_dir(victim))
    assert agent is not None
    workers = agent.children(recursive=True)
    assert len(workers) >= 3  # the warm interpreter, the launcher, a worker
    os.kill(agent.pid, signal.SIGKILL)
    assert processes.wait_until_ended(workers, PATIENCE_S) == []
    gate.open()
    _succeeded(cluster, job)


@pytest.mark.slow
def test_a_frozen_rank_0_wakes_to_find_itself_deposed_and_joins_again(cluster: Cluster) -> None:
    cluster.lease_s = 3.0  # what the others wait for
    cluster.up("2:3")
    job = cluster.train(cluster.write("count.py", COUNTING), "--", "--steps", "100000")
    cluster.wait_for_step(job, 20)
    frozen = cluster.rank0()
    cluster.signal_all(frozen, signal.SIGSTOP)
    two = cluster.wait(lambda: _running(cluster, job, 2), "the two others to go on")
    cluster.wait_for_step(job, 60, number=two)
    cluster.signal_all(frozen, signal.SIGCONT)
    cluster.wait(lambda: _running(cluster, job, 3), "the third to be back")
    assert cluster.rank0() != frozen
    rounds = [entry.round for entry in cluster.checkpoints(job).entries]
    assert rounds == sorted(rounds)
    numbers = [r.number for r in cluster.history(job)]
    assert numbers == sorted(numbers)
    cluster.run("cancel", job)


@pytest.mark.slow
def test_a_node_that_joins_costs_no_step(cluster: Cluster) -> None:
    cluster.up("1:2")
    job = cluster.train(cluster.write("count.py", COUNTING), "--", "--steps", "100000", "--every", "100000")
    cluster.wait_for_step(job, 10)
    other = next(node for node in cluster.nodes() if node != cluster.rank0())
    cluster.run("preempt", other, "--notice", "60", "--replace-after", "0")
    two = cluster.wait(lambda: _running(cluster, job, 2), "two nodes again")
    cluster.wait_for_step(job, 1, number=two)
    cluster.run("cancel", job)
    cluster.wait_for_end(job)
    steps = [m["step"] for m in cluster.metrics(job)]
    assert len(_first_steps(cluster, job)) == 3
    assert sorted(steps) == list(range(1, max(steps) + 1))  # none twice, none left out


@pytest.mark.slow
def test_a_fixed_size_job_waits_for_the_replacement(cluster: Cluster) -> None:
    cluster.up("2")
    gate = Gate(cluster, 50)
    job = cluster.train(cluster.write("count.py", COUNTING), "--", "--steps", "60", *gate.args)
    cluster.wait_for_step(job, 25)
    cluster.kill(next(node for node in cluster.nodes() if node != cluster.rank0()))
    cluster.wait(lambda: (r := cluster.now(job)) and r.phase == "wait", "the job to wait")
    gate.open()
    cluster.up("2")
    _succeeded(cluster, job)


@pytest.mark.slow
def test_a_bucket_that_is_full_holds_checkpoints_up_until_there_is_room_and_loses_none(cluster: Cluster) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    import subprocess

    buckets = cluster.state / "buckets"
    buckets.mkdir(parents=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(buckets)], check=False)
    if mounted.returncode != 0:
        pytest.skip("mounting is not allowed here")
    try:
        cluster.up("1")
        job = cluster.train(
            cluster.write("count.py", COUNTING), "--", "--steps", "100000", "--every", "10", "--rest", "0"
        )
        cluster.wait(lambda: len(cluster.checkpoints(job).entries) > 1, "checkpoints")
        ballast = buckets / "ballast"
        with ballast.open("wb") as file:
            while True:
                try:
                    file.write(b"\0" * 65536)
                    file.flush()
                except OSError:
                    break
        cluster.wait(lambda: "has to wait: the bucket" in _workers_said(cluster), "the bucket to be full")
        before = cluster.checkpoints(job).entries[-1].step
        ballast.unlink()
        cluster.wait(lambda: cluster.checkpoints(job).entries[-1].step > before, "more checkpoints")
        assert [round_.number for round_ in cluster.history(job)] == [1] * len(cluster.history(job))
        step = str(cluster.checkpoints(job).entries[-1].step)
        cluster.run("cancel", job)
        cluster.wait_for_end(job)
        assert cluster.checkpoints(job).entries[-1].step >= int(step)
    finally:
        cluster.end()
        subprocess.run(["umount", "-l", str(buckets)], check=False)


def _workers_said(cluster: Cluster) -> str:
    files = (path for path in cluster.node_dir("node-0").rglob("*") if path.name == "stdout.log")
    return "\n".join(path.read_text(errors="replace") for path in files)
