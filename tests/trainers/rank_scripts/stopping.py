"""What the ranks of the notice tests run: training in lock step, with SIGTERM at chosen moments."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gpuctl import Checkpointer
from tests.waiting import until

Place = Literal["begin", "backward", "end", "saving"]
Moments = dict[int, tuple[int, Place]]
"""Rank → the optimizer step (from 1) and the place in it where the rank is signalled."""

STEPS = 14
EVERY = 4


class _Trap:
    """A part of the state that brings the signal into the middle of a save."""

    def __init__(self) -> None:
        self.armed = False

    def state_dict(self) -> dict[str, Any]:
        if self.armed:
            os.kill(os.getpid(), signal.SIGTERM)
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def train(log: str, moments: Moments, pause_at: int | None = None) -> dict[str, Tensor]:
    """The weights after the last step. Each finished step is a line in ``log``.<rank>. In step ``pause_at`` all ranks
    wait for the file ``log``.go."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    step_of, place_of = moments.get(rank, (0, "end"))
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, 1))
    # With this, DDP keeps its first layout of buckets, and with it the order of additions.
    ddp = DistributedDataParallel(model, find_unused_parameters=True) if world > 1 else model
    trap = _Trap()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "trap": trap}
    checkpointer = Checkpointer(every=EVERY, keep=None, when_busy="wait")
    start = checkpointer.restore(state) or 0
    if start == 0:
        torch.manual_seed(100 + rank)  # dropout goes on from what a checkpoint keeps of each rank
    for step in range(start + 1, STEPS + 1):
        batch = torch.randn(12, 8, generator=torch.Generator().manual_seed(step))[rank::world]
        for place in ("begin", "backward", "end"):
            if place == "backward":
                optimizer.zero_grad()
                ddp(batch).square().mean().backward()
            if place == "end":
                optimizer.step()
            if (step, place) == (step_of, place_of):
                os.kill(os.getpid(), signal.SIGTERM)
        with Path(f"{log}.{rank}").open("a") as file:
            file.write(f"{step}\n")
        if step == pause_at:
            until(Path(f"{log}.go").exists, f"{log}.go")
        trap.armed = (step, "saving") == (step_of, place_of)
        checkpointer.step(step, state)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}
