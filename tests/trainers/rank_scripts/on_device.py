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


def exchanged(device: str, method: Any, steps: int, pause: int = 0) -> dict[str, Tensor]:
    """The weights after steps on each rank's own samples, where ``method`` exchanges gradients.

    In a group of gloo, which takes tensors of any device and any number of ranks on one. ``pause``: cycles that a GPU
    does something else at the beginning of each exchange.
    """
    model, optimizer = _net(device)
    learner = DistributedDataParallel(model, bucket_cap_mb=0.01)
    method.attach(learner, optimizer)
    if pause:
        exchange = method._hook._exchange

        def late(bucket: Any) -> None:
            torch.cuda._sleep(pause)
            exchange(bucket)

        method._hook._exchange = late
    for step in range(steps):
        _learn(learner, optimizer, device, step)
    return {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}


def averaged(device: str, method: Any, steps: int) -> dict[str, Tensor]:
    """As ``exchanged``, where ``method`` averages weights. With what it remembers."""
    model, optimizer = _net(device)
    method.attach(model, optimizer)
    for step in range(steps):
        _learn(model, optimizer, device, step)
        method.after_step()
    found: dict[str, Tensor] = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    return found | {f"outer.{name}": tensor.cpu() for name, tensor in method.state_dict().get("momentum", {}).items()}


def _net(device: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(96, 64), nn.Tanh(), nn.Linear(64, 8)).double().to(device)
    return model, torch.optim.SGD(model.parameters(), 0.05)


def _learn(model: nn.Module, optimizer: torch.optim.Optimizer, device: str, step: int) -> None:
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    inputs = torch.randn(16, 96, generator=generator, dtype=torch.float64).to(device)
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()
