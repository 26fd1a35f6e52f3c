"""A training loop on a device of one's choice, that the tests of CUDA disturb."""

from __future__ import annotations

import copy
import os
import signal
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gpuctl import Checkpointer

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


def training(device: str, seed: int, **options: Any) -> dict[str, Any]:
    """Dropout, so that the device's own generator counts."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.3), nn.Linear(256, 8)).to(device)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), 1e-2, **options)}


def train(state: dict[str, Any], steps: int, precision: torch.dtype = torch.float32) -> None:
    device = next(state["model"].parameters()).device
    scaler = state.get("scaler", torch.GradScaler(device.type, enabled=False))
    for _ in range(steps):
        state["optimizer"].zero_grad()
        with torch.autocast(device.type, precision, enabled=precision != torch.float32):
            loss = state["model"](torch.randn(32, 64, device=device)).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(state["optimizer"])
        scaler.update()


def facts(state: dict[str, Any]) -> dict[str, Any]:
    """To compare, on the host."""
    found = {name: copy.deepcopy(item.state_dict()) for name, item in state.items()}
    kept: dict[str, Any] = torch.utils._pytree.tree_map_only(Tensor, Tensor.cpu, found)
    return kept


def ddp_run(device: str, url: str, steps: int, every: int, kill_at: int = 0) -> tuple[int, dict[str, Any], str]:
    """DDP in a process group of one, with the device's backend. Returns where it began, its end, and the backend."""
    if device == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group(BACKENDS[device])
    state = training(device, seed=0)
    state["model"] = DistributedDataParallel(state["model"])
    checkpointer = Checkpointer(url, every=every, when_busy="wait")
    begun = checkpointer.restore(state) or 0
    for step in range(begun, steps):
        train(state, 1)
        checkpointer.step(step + 1, state)
        if step + 1 == kill_at:
            checkpointer.wait()
            train(state, 2)  # work that is lost
            os.kill(os.getpid(), signal.SIGKILL)
    checkpointer.wait()
    backend = dist.get_backend()
    found = facts({"model": state["model"].module, "optimizer": state["optimizer"]})
    dist.destroy_process_group()
    return begun, found, backend
