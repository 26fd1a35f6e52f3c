"""One rank of a job whose state is sharded (FSDP2), alone on its node.

    python tests/bench/checkpoint/survivor.py TOLD SIZE RUNS    # in the environment that torchrun would make

``TOLD`` is a JSON file: for each rank, the environment of its node in this round, by tier: "near" and "bucket". With 0
``RUNS`` it saves once. Else it restores so often from each in turn, and rank 0 writes ``TOLD``.times: seconds by tier.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[3])

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from gpuctl import Checkpointer
from tests.bench.checkpoint import memory_guard
from tests.bench.checkpoint.weights import Weights


def main(told: str, size: str, runs: str) -> None:
    memory_guard.go_first()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    envs = json.loads(Path(told).read_text())[dist.get_rank()]
    model = Weights(int(size))
    saved = sum(float(parameter.detach().double().sum()) for parameter in model.parameters())
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    if runs == "0":
        os.environ.update(envs["near"])
        checkpointer = Checkpointer()
        checkpointer.save(1, {"model": model})
        checkpointer.wait()
    else:
        times: dict[str, list[float]] = {tier: [] for tier in envs}
        for run in range(int(runs) + 1):
            for tier, env in envs.items():
                taken = _restored(model, env, saved)
                if run > 0:  # the first one touches memory and loads code
                    times[tier].append(taken)
        if dist.get_rank() == 0:
            Path(f"{told}.times").write_text(json.dumps(times))
    dist.barrier()
    dist.destroy_process_group()


def _restored(model: torch.nn.Module, env: dict[str, str], saved: float) -> float:
    """Seconds until all ranks have theirs. Raises ``ValueError`` if that is not what was saved."""
    os.environ.update(env)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    dist.barrier()
    began = time.perf_counter()
    Checkpointer().restore({"model": model})
    dist.barrier()
    taken = time.perf_counter() - began
    found = torch.zeros(1, dtype=torch.float64)
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        found += parameter.to_local().detach().double().sum()
    dist.all_reduce(found)
    if abs(float(found) - saved) > 1e-6 * abs(saved):
        raise ValueError(f"what came back sums up to {float(found)}, not to {saved}")
    return taken


if __name__ == "__main__":
    main(*sys.argv[1:])
