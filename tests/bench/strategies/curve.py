"""One rank of a whole training run of ``charlm``: validation losses on the way. Rank 0 prints them as JSON.

python -m tests.bench.strategies.curve STRATEGY STEPS SEED RATE
"""

from __future__ import annotations

import json
import math
import sys
from typing import Any

import torch
import torch.distributed as dist
from examples.charlm import CONTEXT, CharLM, corpus
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from gpuctl.cluster.jobs.strategy import parse
from gpuctl.trainers import gloo_exit
from gpuctl.trainers.strategies.named import named
from gpuctl.trainers.strategies.outer.local_steps import LocalSteps

BATCH = 8
"""Windows of each rank in a step."""
POINTS = 20
"""Validation losses of a run."""
_HELD_OUT = 50_000
_WARM_UP = 0.05


def train(strategy: str, count: int, seed: int, rate: float) -> list[tuple[int, float]]:
    """Steps and validation losses: AdamW with a cosine to a tenth. The data, and the weights at the beginning, are
    those of ``seed``."""
    rank = dist.get_rank()
    text = corpus()
    training, held_out = text[:-_HELD_OUT].long(), text[-_HELD_OUT:].long()
    torch.manual_seed(seed)
    net = CharLM(width=32, heads=2, layers=2)
    way = named(parse(strategy))
    outer = way if isinstance(way, LocalSteps) else None
    model = net if outer else DistributedDataParallel(net, forward_sync_buffers=False)
    optimizer = torch.optim.AdamW(model.parameters(), rate)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _schedule(step / count))
    way.attach(model, optimizer)
    found = []
    is_due = False
    for step in range(count):
        generator = torch.Generator().manual_seed((seed * 1_000_003 + step) * 64 + rank)
        inputs, targets = _windows(training, BATCH, generator)
        optimizer.zero_grad()
        cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
        scheduler.step()
        is_boundary = outer is None or outer.after_step()
        if outer and step + 1 == count:
            is_boundary = outer.finish() or is_boundary
        is_due |= (step + 1) % (count // POINTS) == 0
        if is_due and is_boundary:  # between boundaries, each worker has weights of its own
            is_due = False
            found.append((step + 1, _validated(net, held_out) if rank == 0 else math.nan))
            if rank == 0:
                print(f"{strategy} seed {seed}: step {step + 1} loss {found[-1][1]:.4f}", file=sys.stderr, flush=True)
    return found


def _schedule(done: float) -> float:
    if done < _WARM_UP:
        return done / _WARM_UP + 1e-3
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (done - _WARM_UP) / (1 - _WARM_UP)))


def _windows(text: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(text) - CONTEXT - 1, (count,), generator=generator)
    windows = text[starts.unsqueeze(1) + torch.arange(CONTEXT + 1)]
    return windows[:, :-1], windows[:, 1:]


@torch.no_grad()
def _validated(net: nn.Module, held_out: Tensor) -> float:
    """The mean over 512 windows, the same ones each time."""
    generator = torch.Generator().manual_seed(0)
    inputs, targets = _windows(held_out, 512, generator)
    return float(cross_entropy(net(inputs).flatten(0, 1), targets.flatten()))


def main(strategy: str, count: str, seed: str, rate: str) -> None:
    torch.set_num_threads(1)
    gloo_exit.install()
    dist.init_process_group("gloo")
    told: list[Any] = train(strategy, int(count), int(seed), float(rate))
    if dist.get_rank() == 0:
        print(json.dumps(told), flush=True)
    dist.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
