"""The training script of the bench: a plain DDP loop, the same under ``gpuctl train`` and under torchrun.

Each optimizer step is about 10 ms of real work. Under gpuctl its checkpoints are ``gpuctl.Checkpointer``'s; under
torchrun they are ``torch.save`` to a file that all nodes see, which is what its documentation shows.

One line per mark goes to ``--marks`` with one ``write``: what, step, seconds (the machine's monotonic clock, which all
its processes share), round, rank, world, pid.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

IN_GPUCTL = "GPUCTL_ROUND_DIR" in os.environ

if IN_GPUCTL:
    from gpuctl import Checkpointer


class Log:
    """``--marks``, opened once for appending."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        round_, rank, world = (os.environ.get(name, "0") for name in ("GPUCTL_ROUND", "RANK", "WORLD_SIZE"))
        self._who = f"{round_} {rank} {world} {os.getpid()}"

    def mark(self, what: str, step: int) -> None:
        os.write(self._file, f"{what} {step} {time.monotonic():.6f} {self._who}\n".encode())


class SavedFile:
    """Checkpoints by hand: rank 0 writes a file, every rank reads it."""

    def __init__(self, path: Path, every: int) -> None:
        self._path = path
        self._every = every

    def restore(self, state: dict[str, Any]) -> int | None:
        if not self._path.exists():
            return None
        saved = torch.load(self._path)
        for name, item in state.items():
            item.load_state_dict(saved[name])
        return int(saved["step"])

    def step(self, step: int, state: dict[str, Any]) -> None:
        if step % self._every == 0 and dist.get_rank() == 0:
            partial = self._path.with_suffix(".partial")
            torch.save({"step": step, **{name: item.state_dict() for name, item in state.items()}}, partial)
            partial.replace(self._path)


def main() -> None:
    options = parsed()
    log = Log(options.marks)
    log.mark("begin", 0)
    dist.init_process_group("gloo")
    log.mark("joined", 0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    checkpoints = Checkpointer(every=options.every) if IN_GPUCTL else SavedFile(options.checkpoint, options.every)
    ddp = DistributedDataParallel(model)
    start = checkpoints.restore(state) or 0
    log.mark("restored", start)
    for step in range(start, options.steps):
        inputs, targets = batch(step)
        loss = (ddp(inputs) - targets).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log.mark("step", step + 1)
        checkpoints.step(step + 1, state)


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
    inputs = torch.randn(64, 64, generator=generator)
    return inputs, inputs.sum(1, keepdim=True)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--marks", type=Path, required=True)
    parser.add_argument("--checkpoint", type=Path, help="under torchrun only")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--every", type=int, default=50)
    return parser.parse_args()


if __name__ == "__main__":
    main()
