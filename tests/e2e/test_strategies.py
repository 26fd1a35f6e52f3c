"""Workers that train apart, under the real command line: a node killed and a notice in the middle of an outer step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.e2e.machine import Cluster
from tests.e2e.scripts import Gate
from tests.waiting import until

APART = """
    import argparse, os, time
    import torch, torch.distributed as dist
    import gpuctl
    from gpuctl import Checkpointer, Private, log_metrics

    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--gate", action="append", default=[])
    parser.add_argument("--out")
    args = parser.parse_args()
    gates = {int(step): path for step, path in (gate.split("=", 1) for gate in args.gate)}

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    outer = gpuctl.strategy().attach(model, optimizer)
    checkpointer = Checkpointer(every=1, when_busy="wait")
    state = {"model": model, "optimizer": Private(optimizer), "outer": outer}
    checkpointer.restore(state)
    print("starts at", outer.step, "as", outer, flush=True)
    for step, worker in outer.steps(args.steps):
        batch = torch.randn(8, 16, generator=torch.Generator().manual_seed(step * 64 + worker))
        loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        while step in gates and not os.path.exists(gates[step]):
            time.sleep(0.05)
        at_boundary = outer.after_step()
        log_metrics(outer.step, loss=loss)
        if at_boundary:
            checkpointer.step(outer.step, state)
    checkpointer.wait()
    if args.out and dist.get_rank() == 0:
        torch.save(model.state_dict(), args.out)
"""


@pytest.mark.slow
def test_a_node_killed_within_an_outer_step_changes_nothing_and_a_notice_ends_it(
    cluster: Cluster, tmp_path: Path
) -> None:
    cluster.up("2")
    script = cluster.write("apart.py", APART)
    calm, rough, short = tmp_path / "calm.pt", tmp_path / "rough.pt", tmp_path / "short.pt"
    named = ("--strategy", "diloco:every=40,inner=each")
    cluster.run("train", *named, script, "--", "--out", str(calm))

    gate = Gate(cluster, 100)
    job = cluster.train(*named, script, "--", "--out", str(rough), *gate.args)
    until(lambda: [entry.step for entry in cluster.checkpoints(job).entries][-1:] == [80], "the boundary of step 80")
    cluster.wait_for_step(job, 99)
    cluster.run("preempt", cluster.rank0(), "--notice", "0", "--replace-after", "0")
    cluster.wait(lambda: _has_two_again(cluster, job), "two nodes again")
    gate.open()
    outcome = cluster.wait_for_end(job).outcome
    assert outcome is not None and outcome.result == "succeeded"
    assert "starts at 80 as DiLoCo(every=40)" in cluster.run("logs", job).stdout
    ours, theirs = torch.load(rough), torch.load(calm)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)

    gate = Gate(cluster, 101)
    job = cluster.train(*named, script, "--", "--out", str(short), *gate.args)
    cluster.wait_for_step(job, 99)
    now = cluster.now(job)
    assert now is not None
    other = next(member.node for member in now.members if member.node != cluster.rank0())
    with cluster.notice(other, "--replace-after", "0"):
        gate.open()
    outcome = cluster.wait_for_end(job).outcome
    assert outcome is not None and outcome.result == "succeeded"
    steps = [entry.step for entry in cluster.checkpoints(job).entries]
    assert 200 in steps and any(80 < step < 120 for step in _restored(cluster, job)), steps


def _has_two_again(cluster: Cluster, job: str) -> bool:
    now = cluster.now(job)
    return now is not None and now.number > 1 and now.phase == "run" and len(now.members) == 2


def _restored(cluster: Cluster, job: str) -> list[int]:
    """The steps that rounds began with."""
    told = cluster.run("logs", job).stdout.splitlines()
    return [int(line.split("starts at ")[1].split()[0]) for line in told if "starts at " in line]
