"""The same training twice in one pair of processes: by ``Trainer``, and by hand in plain DDP, in turns.

Model, loss, optimizer and data are those of ``examples/digits.py``, and both sides see the same batches. The loop by
hand does what a person would write: forward, backward, step, and every LOG_EVERY steps a line with the mean loss of all
ranks. A hook on the optimizer, the same for both, notes when each step was done. OUT gets the seconds of each block of
LOG_EVERY steps, one log line in it.

    torchrun --nproc-per-node 2 tests/bench/two_loops.py OUT STEPS TURNS LOG_EVERY
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

sys.path[0] = str(Path(__file__).resolve().parents[2])

from examples.digits import data, network  # noqa: E402

from gpuctl import Trainer  # noqa: E402
from gpuctl.trainers.sampling import mixed  # noqa: E402

BATCH = 192


def main(out: str, steps: str, turns: str, log_every: str) -> None:
    dist.init_process_group("gloo")
    train, _ = data(0)
    blocks: dict[str, list[float]] = {"trainer": [], "hand": []}
    loops: dict[str, Callable[[nn.Module, Optimizer, TensorDataset, int, int], None]]
    loops = {"trainer": by_trainer, "hand": by_hand}
    for turn in range(2 * int(turns)):
        name = ("trainer", "hand", "hand", "trainer")[turn % 4]
        os.environ["GPUCTL_JOB"] = f"rate-{turn}"  # no checkpoint of an earlier turn to go on from
        torch.manual_seed(0)
        model = network(16)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.01)
        ends: list[float] = []
        optimizer.register_step_post_hook(lambda *_, ends=ends: ends.append(time.perf_counter()))
        dist.barrier()
        loops[name](model, optimizer, train, int(steps), int(log_every))
        marks = ends[int(log_every) - 1 :: int(log_every)]  # the first steps warm up caches
        blocks[name] += [after - before for before, after in pairwise(marks)]
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(blocks))
    dist.destroy_process_group()


def loss_of() -> nn.Module:
    return nn.CrossEntropyLoss(label_smoothing=0.05)


def by_trainer(model: nn.Module, optimizer: Optimizer, dataset: TensorDataset, steps: int, log_every: int) -> None:
    Trainer(model, loss_of(), optimizer, dataset, global_batch=BATCH, steps=steps, log_every=log_every).fit()


def by_hand(model: nn.Module, optimizer: Optimizer, dataset: TensorDataset, steps: int, log_every: int) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    inputs, targets = dataset.tensors
    ddp, loss_fn, share = DistributedDataParallel(model), loss_of(), BATCH // world
    per_epoch = len(inputs) // BATCH
    lines = Path(os.environ["BENCH_LINES"]).open("a", buffering=1)  # noqa: SIM115 - it lives as long as the loop
    began, said = time.perf_counter(), 0
    for step in range(steps):
        epoch, place = divmod(step, per_epoch)
        if place == 0:
            order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(mixed(0, epoch)))
        mine = order[place * BATCH + rank * share : place * BATCH + (rank + 1) * share]
        optimizer.zero_grad()
        loss = loss_fn(ddp(inputs[mine]), targets[mine])
        loss.backward()
        optimizer.step()
        if (step + 1) % log_every == 0:
            mean = loss.detach()
            dist.all_reduce(mean)
            now = time.perf_counter()
            if rank == 0:
                rate = (step + 1 - said) / (now - began)
                lines.write(json.dumps({"step": step + 1, "loss": float(mean) / world, "steps_per_s": rate}) + "\n")
            began, said = now, step + 1
    lines.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
