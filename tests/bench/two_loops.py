"""The same training twice in one pair of processes: by ``Trainer`` and by hand in plain DDP, a block of steps in turn.

Model, loss, optimizer and data are those of ``examples/digits.py``, and both sides see the same batches. The loop by
hand does what a person would write: forward, backward, step, and every LOG_EVERY steps a line with the mean loss of all
ranks. It is run from a hook that ``Trainer``'s optimizer calls after each step, so both meet the same moments of a
machine that others use too. OUT gets pairs of seconds: a block of LOG_EVERY steps by ``Trainer``, the next one by hand.

    torchrun --nproc-per-node 2 tests/bench/two_loops.py OUT BLOCKS LOG_EVERY
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.utils.data import TensorDataset

sys.path[0] = str(Path(__file__).resolve().parents[2])

from examples.digits import data, network  # noqa: E402

from gpuctl import Trainer  # noqa: E402
from gpuctl.trainers.data.sampling import mixed  # noqa: E402

BATCH = 192
_WARM_UP = 3
"""Blocks that do not count."""


def main(out: str, blocks: str, log_every: str) -> None:
    dist.init_process_group("gloo")
    train, _ = data(0)
    pairs = Pairs(ByHand(train, int(log_every)), int(log_every))
    model, optimizer = made()
    optimizer.register_step_post_hook(pairs.after_step)
    steps = int(log_every) * (int(blocks) + _WARM_UP)
    Trainer(model, loss_of(), optimizer, train, global_batch=BATCH, steps=steps, log_every=int(log_every)).fit()
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(pairs.seconds[_WARM_UP:]))


def made() -> tuple[nn.Module, AdamW]:
    torch.manual_seed(0)
    model = network(16)
    return model, AdamW(model.parameters(), 1e-3, weight_decay=0.01)


def loss_of() -> nn.Module:
    return nn.CrossEntropyLoss(label_smoothing=0.05)


class Pairs:
    """Times the blocks. What ``Trainer`` does after a block's last step counts in its next block."""

    def __init__(self, by_hand: ByHand, log_every: int) -> None:
        self.seconds: list[tuple[float, float]] = []
        self._by_hand = by_hand
        self._log_every = log_every
        self._steps = 0
        self._began = time.perf_counter()

    def after_step(self, *_: Any) -> None:
        self._steps += 1
        if self._steps % self._log_every == 0:
            between = time.perf_counter()
            self._by_hand.block()
            now = time.perf_counter()
            self.seconds.append((between - self._began, now - between))
            self._began = now


class ByHand:
    """The loop that a person would write."""

    def __init__(self, dataset: TensorDataset, log_every: int) -> None:
        self._model, self._optimizer = made()
        self._optimizer.register_step_post_hook(lambda *_: None)  # as the other one has a hook, which takes its time
        self._ddp = DistributedDataParallel(self._model)
        self._loss = loss_of()
        self._inputs, self._targets = dataset.tensors
        self._log_every = log_every
        self._step = 0
        self._order = torch.empty(0)
        self._lines = Path(os.environ["BENCH_LINES"]).open("a", buffering=1)  # noqa: SIM115 - as long as the process

    def block(self) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        inputs, targets, share = self._inputs, self._targets, BATCH // world
        per_epoch = len(inputs) // BATCH
        began = time.perf_counter()
        for step in range(self._step, self._step + self._log_every):
            epoch, place = divmod(step, per_epoch)
            if place == 0:
                generator = torch.Generator().manual_seed(mixed(0, epoch))
                self._order = torch.randperm(len(inputs), generator=generator)
            mine = self._order[place * BATCH + rank * share : place * BATCH + (rank + 1) * share]
            self._optimizer.zero_grad()
            loss = self._loss(self._ddp(inputs[mine]), targets[mine])
            loss.backward()
            self._optimizer.step()
        self._step += self._log_every
        mean = loss.detach()
        dist.all_reduce(mean)
        if rank == 0:
            rate = self._log_every / (time.perf_counter() - began)
            line = {"step": self._step, "loss": float(mean) / world, "steps_per_s": rate}
            self._lines.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
    dist.destroy_process_group()  # after main, when DDP is gone (pytorch#56297)
