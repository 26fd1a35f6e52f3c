"""What the ranks of the DCP tests run."""

from __future__ import annotations

import contextlib
import io
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from gpuctl import BucketReader, BucketWriter
from gpuctl.cluster.storage.bucket import open_bucket
from gpuctl.trainers.checkpoint.save.uploader import TransferLimits
from tests.trainers.rank_scripts.checkpointing import StoppingStore


def learner(seed: int, sharded: bool = False, steps: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and an optimizer with a state, the same on all ranks, in DDP or in FSDP2 if there are several."""
    torch.manual_seed(seed)
    layers = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    model: nn.Module = layers
    if sharded:
        for part in (layers[0], layers[2], layers):
            fully_shard(part, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    elif dist.is_initialized():
        model = DistributedDataParallel(layers)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(4, 5)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def facts(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The whole of both, on every rank, at once a copy."""

    def whole(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: whole(item) for key, item in value.items()}
        if isinstance(value, list):
            return [whole(item) for item in value]
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        return value.clone() if isinstance(value, Tensor) else value

    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": whole(of_model), "optimizer": whole(of_optimizer)}


def save(url: str, step: int, sharded: bool = False) -> dict[str, Any]:
    model, optimizer = learner(step, sharded)
    of_model, of_optimizer = get_state_dict(model, optimizer)
    state = {"model": of_model, "optimizer": of_optimizer, "epoch": step}
    dcp.save(state, storage_writer=BucketWriter(url, step=step))
    return facts(model, optimizer)


def load(url: str, step: int | None = None, sharded: bool = False) -> tuple[int | None, int, dict[str, Any]]:
    model, optimizer = learner(99, sharded)
    of_model, of_optimizer = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": of_model, "optimizer": of_optimizer, "epoch": 0}
    reader = BucketReader(url, step=step)
    dcp.load(state, storage_reader=reader)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return reader.loaded, state["epoch"], facts(model, optimizer)


def save_in_the_background(url: str) -> list[int]:
    """The steps that are there once it is done."""
    weights = torch.ones(1 << 20)
    state = {"weights": weights, "epoch": 1}
    group = dist.new_group(backend="gloo")
    future = dcp.async_save(state, storage_writer=BucketWriter(url, step=1), process_group=group)
    weights.zero_()
    state["epoch"] = 2
    assert isinstance(future, Future)
    future.result()
    return BucketReader(url).steps()


def save_large(url: str) -> None:
    """An embedding that is more than half of it, many small tensors, and some that only one rank has."""
    state: dict[str, Any] = {"embedding": torch.arange(3 << 20), "head": torch.ones(1 << 19)}
    state |= {f"layer{n}": torch.full((10_000 + 100 * n,), float(n)) for n in range(40)}
    state[f"own{dist.get_rank()}"] = torch.full((100_000 * dist.get_rank(),), 1.0)
    dcp.save({"model": state}, storage_writer=BucketWriter(url, step=1))


def save_in_halves(url: str) -> None:
    """Four ranks as two by two: what two of them hold is sharded over the other dimension."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    layers = nn.Sequential(nn.Linear(512, 1024, bias=False), nn.Linear(1024, 2048, bias=False))
    fully_shard(layers, mesh=mesh)
    dcp.save({"model": layers.state_dict()}, storage_writer=BucketWriter(url, step=1))


def refused(number: int) -> str:
    """What a save of step ``number`` to the job's own folder ends with."""
    try:
        dcp.save({"weights": torch.ones(3)}, storage_writer=BucketWriter(step=number))
    except CheckpointException as error:
        return "\n".join(f"{type(found).__name__}: {found}" for found, _ in error.failures.values())
    return ""


def save_and_stop(url: str, rank: int, nth: int, number: int, mark: str) -> None:
    """Save steps 1 and 2. During the second save ``rank`` gets signal ``number``, just before its ``nth`` write."""
    store = StoppingStore(open_bucket(url), number, Path(mark))
    writer = BucketWriter(store=store, keep=1)
    for step in (1, 2):
        if step == 2 and (dist.get_rank() if dist.is_initialized() else 0) == rank:
            store.arm(nth)
        state = {"weights": torch.full((1 << 20,), float(step)), "step": step}
        dcp.save(state, storage_writer=writer, checkpoint_id=str(step))


def growth(url: str) -> tuple[float, float]:
    """By how many MiB a process grows that saves 256 MiB, and loads them."""
    limits = TransferLimits(memory_bytes=64 << 20)
    state = {"plain": torch.ones(32 << 20), "turned": torch.ones(4096, 8192).t()}
    small = {"weights": torch.ones(3)}
    dcp.save(small, storage_writer=BucketWriter(url, step=1))
    dcp.load(small, storage_reader=BucketReader(url))
    saving = _growth(lambda: dcp.save(state, storage_writer=BucketWriter(url, step=2, limits=limits)))
    for tensor in state.values():
        tensor.zero_()
    loading = _growth(lambda: dcp.load(state, storage_reader=BucketReader(url, limits=limits)))
    assert all(bool(tensor.eq(1).all()) for tensor in state.values())
    return saving, loading


def _growth(call: Callable[[], object]) -> float:
    process, over = psutil.Process(), threading.Event()
    before = process.memory_info().rss
    most = before

    def watch() -> None:
        nonlocal most
        while not over.wait(0.001):
            most = max(most, process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    call()
    over.set()
    watcher.join()
    return (most - before) / (1 << 20)


def save_by_cached_plans(url: str) -> None:
    for step in (1, 2, 3):
        state = {"large": torch.full((1 << 20,), float(step)), "step": step}
        if step == 3:
            state["new"] = torch.full((5,), 3.0)
        planner = DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(state, storage_writer=BucketWriter(url, step=step), planner=planner)


def watched_load(url: str) -> tuple[str, list[str]]:
    """What a load ended with, and which audited events it caused that run or load code."""
    seen: list[str] = []

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("pickle.find_class", "os.system", "subprocess.Popen", "os.mknod"):
            seen.append(f"{event} {arguments[:2]}")

    state = {"weights": torch.zeros(3), "epoch": 0, "pair": None}
    reader = BucketReader(url)
    sys.addaudithook(watch)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):  # up to torch 2.11, the exception does not tell why
            dcp.load(state, storage_reader=reader)
    except CheckpointException as error:
        return f"{error}{said.getvalue()}", seen
    return "", seen
