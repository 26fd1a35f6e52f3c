"""Local nodes on a machine with GPUs: who gets which, and jobs that use them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.e2e.machine import Cluster

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no NVIDIA GPU here")
SEES = """
    import os
    print("sees", os.environ["LOCAL_RANK"], os.environ["CUDA_VISIBLE_DEVICES"], "of", os.environ["WORLD_SIZE"])
"""


def with_gpus(cluster: Cluster, folder: Path, count: int) -> None:
    """As many as ``nvidia-smi`` names; there is no driver behind it."""
    smi = folder / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text("#!/bin/sh\n" + "".join(f"echo 'GPU {n}: NVIDIA H100 (UUID: GPU-{n})'\n" for n in range(count)))
    smi.chmod(0o755)
    cluster.env["PATH"] = f"{smi.parent}:{cluster.env['PATH']}"


def seen_by_workers(cluster: Cluster) -> list[str]:
    """Local rank and visible GPUs of each, and how many workers there are."""
    done = cluster.run("train", cluster.write("sees.py", SEES))
    return sorted(re.findall(r"sees (\d.* of \d)", done.stdout))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gpus", "up", "seen"),
    [
        (2, ("2",), ["0 0 of 2", "0 1 of 2"]),
        (5, ("2",), ["0 0,1 of 4", "0 2,3 of 4", "1 0,1 of 4", "1 2,3 of 4"]),
        (1, ("2",), ["0  of 2", "0  of 2"]),
        (2, ("1", "--slots", "3"), ["0  of 3", "1  of 3", "2  of 3"]),
    ],
    ids=["one each", "two each", "more nodes than GPUs", "more slots than GPUs"],
)
def test_each_worker_has_a_gpu_of_its_own_or_none_has_any(
    cluster: Cluster, tmp_path: Path, gpus: int, up: tuple[str, ...], seen: list[str]
) -> None:
    """Where only some have one, these choose NCCL and the others gloo, and no round ever begins."""
    with_gpus(cluster, tmp_path, gpus)
    said = cluster.run("up", "--nodes", *up)
    assert ("all train on the CPU" in said.stdout + said.stderr) == ("0  of" in seen[0])
    assert seen_by_workers(cluster) == seen


@pytest.mark.slow
@pytest.mark.parametrize("by", ["up", "preempt"])
def test_a_node_that_replaces_another_has_the_gpu_that_became_free(cluster: Cluster, tmp_path: Path, by: str) -> None:
    """NCCL takes no two ranks on one GPU."""
    with_gpus(cluster, tmp_path, 2)
    cluster.up("2")
    cluster.run("preempt", "node-1", "--notice", "0", "--replace-after", "0" if by == "preempt" else "never")
    if by == "up":
        cluster.up("2")
    assert seen_by_workers(cluster) == ["0 0 of 2", "0 1 of 2"]


LEARNS = """
    import hashlib, sys, torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from gpuctl import Checkpointer, log_metrics

    device, go_on = sys.argv[1], sys.argv[2]
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Dropout(0.3), torch.nn.Linear(256, 1)).to(device)
    learner, optimizer = DistributedDataParallel(model), torch.optim.AdamW(model.parameters(), 1e-2)
    checkpointer, state = Checkpointer(every=10), {"model": model, "optimizer": optimizer}
    begun = checkpointer.restore(state) or 0
    for step in range(begun, 200):
        optimizer.zero_grad()
        loss = learner(torch.randn(32, 64, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        checkpointer.step(step + 1, state)
        log_metrics(step + 1, loss=loss)
        if step + 1 == 95 and begun == 0 and go_on == "wait":
            checkpointer.wait()
            print("waits", flush=True)
            while not checkpointer.should_stop(step + 1):
                pass
            checkpointer.save(step + 1, state)
            checkpointer.leave()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    digest = hashlib.sha256(weights.cpu().numpy().tobytes()).hexdigest()
    print("ended on", weights.device.type, dist.get_backend(), "from", begun, "with", digest, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("notice", ["0", "30"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_gpu)])
def test_a_job_that_lost_its_only_node_ends_with_the_same_bits(cluster: Cluster, device: str, notice: str) -> None:
    """On a GPU with NCCL, whose ranks cannot share one; in workers that were forked, where CUDA begins anew."""
    backend = {"cpu": "gloo", "cuda": "nccl"}[device]
    cluster.up("1", "--slots", "1")
    script = cluster.write("learns.py", LEARNS)
    ended = re.compile(rf"ended on {device} {backend} from (\d+) with (\w+)")
    undisturbed = ended.search(cluster.run("train", script, "--", device, "go").stdout)
    job = cluster.train(script, "--", device, "wait")
    cluster.wait(lambda: "waits" in cluster.run("logs", job).stdout, "all saves to be over")
    kept = cluster.checkpoints(job).entries[-1].step  # one that falls due while another is on its way is left out
    cluster.run("preempt", "node-0", "--notice", notice, "--replace-after", "0")
    assert (outcome := cluster.wait_for_end(job).outcome) and outcome.result == "succeeded"
    disturbed = ended.search(cluster.run("logs", job).stdout)
    assert undisturbed and disturbed
    assert (undisturbed[1], disturbed[1]) == ("0", str(kept) if notice == "0" else "95")
    assert undisturbed[2] == disturbed[2]


@pytest.mark.slow
@on_gpu
def test_verify_misses_no_gpu_that_local_nodes_are_not_given(cluster: Cluster) -> None:
    cluster.up(str(torch.cuda.device_count() + 1), "--slots", "1")
    cluster.run("verify", "--burn-in", "1")
