"""What the ranks of the checkpoint tests run: small models, and stores that stop their process at a chosen moment."""

from __future__ import annotations

import copy
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from gpuctl import Checkpointer
from gpuctl.cluster.errors import GpuctlError, StoreError
from gpuctl.cluster.storage.bucket import open_bucket
from gpuctl.cluster.storage.interface import Entry, PartStore
from tests.waiting import until


class Model(nn.Module):
    """Kinds of tensors that a real model has: shared, empty, scalar, half, integer and strided ones, and buffers."""

    running: Tensor

    def __init__(self, width: int = 6, deeper: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, width, 3)
        self.norm = nn.BatchNorm2d(width)
        self.head = nn.Linear(width, 3, bias=False)
        self.tied = nn.Linear(width, 3, bias=False)
        self.tied.weight = self.head.weight
        self.scale = nn.Parameter(torch.ones(()))
        self.none = nn.Parameter(torch.empty(0, 4))
        self.strided = nn.Parameter(torch.randn(4, 5).t())
        self.register_buffer("short", torch.randn(3).bfloat16())
        self.register_buffer("running", torch.zeros(1))
        if deeper:
            self.deeper = nn.Linear(2, 2)

    def forward(self, images: Tensor) -> Tensor:
        self.running += 1 + _rank()  # differs from rank to rank, as BatchNorm's averages do
        features = self.norm(self.conv(images)).relu().mean((2, 3))
        both: Tensor = self.scale * (self.head(features) + self.tied(features))
        return both + self.strided.sum() + self.none.sum()


def training(width: int = 6, seed: int = 0, deeper: bool = False) -> dict[str, Any]:
    torch.manual_seed(seed)
    model: nn.Module = Model(width, deeper)
    if dist.is_initialized():
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4]),
        "seen": {"samples": 0, 3: (1.5, None), "labels": Counter(cat=2)},
        "average": torch.zeros(2, dtype=torch.float64),
    }


def train(state: dict[str, Any], steps: int = 1) -> None:
    for _ in range(steps):
        state["optimizer"].zero_grad()
        state["model"](torch.randn(4, 1, 6, 6)).square().mean().backward()
        state["optimizer"].step()
        state["scheduler"].step()
        state["seen"]["samples"] += 4
        state["average"] += 0.5


def facts(state: dict[str, Any]) -> dict[str, Any]:
    """All there is to compare of a state as it is now, without the world's traces."""
    model = getattr(state["model"], "module", state["model"])
    return copy.deepcopy(
        {
            "model": dict(model.state_dict()),
            "optimizer": state["optimizer"].state_dict(),
            "scheduler": state["scheduler"].state_dict(),
            "seen": state["seen"],
            "average": state["average"],
        }
    )


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def same(a: Any, b: Any) -> bool:
    """Equal to the last bit, and in type."""
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return type(a) is type(b) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


# -- what ranks run ---------------------------------------------------------------------------------------------------


def kept(checkpointer: Checkpointer, step: int, state: dict[str, Any]) -> None:
    """Save, and wait until it is committed."""
    checkpointer.save(step, state)
    checkpointer.wait()


def save_some(url: str, steps: list[int], keep: int | None = 3) -> tuple[dict[str, Any], tuple[float, ...]]:
    """Train and save at each of ``steps``; the state at the last of them, and what is drawn next there."""
    state, checkpointer = training(), Checkpointer(url, keep=keep)
    at = checkpointer.restore(state) or 0
    for generator in (random.seed, np.random.seed, torch.manual_seed):
        generator(100 + _rank())
    for step in steps:
        train(state, step - at)
        at = step
        checkpointer.save(step, state)
    checkpointer.wait()
    return facts(state), draws()


def restore_one(url: str, width: int = 6, deeper: bool = False) -> tuple[int | None, dict[str, Any], Any]:
    state = training(width, 1, deeper)
    for generator in (random.seed, np.random.seed, torch.manual_seed):
        generator(200 + _rank())
    step = Checkpointer(url).restore(state)
    return step, facts(state), draws()


def refused(url: str, width: int, deeper: bool) -> tuple[str, bool]:
    """What ``restore`` says, and whether it left the state alone."""
    state = training(width, 1, deeper)
    before = facts(state)["model"]
    try:
        Checkpointer(url).restore(state)
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}", same(before, facts(state)["model"])
    return "", False


def save_sharded(url: str) -> dict[str, Tensor]:
    """Train and save a model whose parameters and optimizer states are sharded, and gather the weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    state = {"model": model, "optimizer": optimizer}
    checkpointer = Checkpointer(url)
    step = checkpointer.restore(state) or 0
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(4, 5)).square().mean().backward()
        optimizer.step()
    checkpointer.save(step + 2, state)
    checkpointer.wait()
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


def restore_whole(url: str) -> tuple[int | None, dict[str, Tensor], set[int]]:
    """The same model without shards, and how many steps its optimizer has made."""
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    step = Checkpointer(url).restore({"model": model, "optimizer": optimizer})
    return step, dict(model.state_dict()), {int(kept["step"]) for kept in optimizer.state.values()}


def save_where_refused_and_here(url: str) -> str:
    """What became of step 1, in a store that takes no parts, before step 2 is saved to ``url``."""
    said, state = "", {"weights": torch.ones(3)}
    try:
        kept(Checkpointer(store=RefusingStore(open_bucket(f"{url}-refusing"), 0, Path())), 1, state)
    except GpuctlError as error:
        said = str(error)
    kept(Checkpointer(url), 2, state)
    return said


def save_and_stop(url: str, rank: int, nth: int, number: int, mark: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Save steps 1 and 2, and return the states at both. During the second save ``rank`` gets signal ``number``, just
    before its ``nth`` write to the store; the file ``mark`` exists from then on."""
    store = StoppingStore(open_bucket(url), number, Path(mark))
    state, checkpointer = training(), Checkpointer(store=store, keep=1)
    checkpointer.restore(state)
    train(state)
    checkpointer.save(1, state)
    checkpointer.wait()
    first = facts(state)
    train(state)
    if _rank() == rank:
        store.arm(nth)
    checkpointer.save(2, state)
    checkpointer.wait()
    return first, facts(state)


class StoppingStore:
    """A store before whose n-th write its process gets a signal."""

    def __init__(self, store: PartStore, number: int, mark: Path) -> None:
        self._store = store
        self._number = number
        self._mark = mark
        self._left = 0
        self._lock = threading.Lock()

    def arm(self, nth: int) -> None:
        self._left = nth

    def get(self, key: str) -> bytes | None:
        return self._store.get(key)

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        return self._store.get_many(keys)

    def list(self, prefix: str, after: str | None = None) -> list[Entry]:
        return self._store.list(prefix, after)

    def get_range(self, key: str, start: int, end: int) -> memoryview:
        return self._store.get_range(key, start, end)

    def stream(self, key: str, start: int, end: int) -> Iterator[memoryview]:
        return self._store.stream(key, start, end)

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._count()
        self._store.put(key, data)

    def create(self, key: str, data: bytes) -> bool:
        self._count()
        return self._store.create(key, data)

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._count()
            self._store.delete([key])

    def _count(self) -> None:
        with self._lock:
            self._left -= 1
            if self._left == 0:
                self._mark.touch()
                # To this thread: a process that stops may write on until the signal has reached them all.
                signal.pthread_kill(threading.get_ident(), self._number)


class RefusingStore(StoppingStore):
    """A store that takes no parts."""

    def put(self, key: str, data: bytes | memoryview) -> None:
        raise StoreError(f"the bucket refuses {len(data)} bytes at {key}")


def save_at_odds(url: str, steps: Sequence[int], unkept: int = -1) -> None:
    """Each rank saves its own of ``steps``; the rank ``unkept`` has a state that no checkpoint can keep."""
    checkpointer = Checkpointer(url)
    state: dict[str, Any] = {"weights": torch.ones(4)}
    if _rank() == unkept:
        state["handle"] = threading.Lock()
    checkpointer.save(steps[_rank()], state)


def leave_apart(url: str, folder: str) -> None:
    """Rank 0's ``wait`` ends once rank 1 waits for it in ``leave``, or has left. When that was, and when each rank
    left, is in ``folder``, by the machine's monotonic clock."""
    over, met, left = (Path(folder, name) for name in ("over", "met", "left.1"))
    barrier = dist.barrier

    def noted_barrier(*args: Any, **options: Any) -> Any:
        if _rank() == 1 and over.exists():
            met.touch()
        return barrier(*args, **options)

    class Held(Checkpointer):
        def wait(self, timeout: float | None = None) -> None:
            super().wait(timeout)
            if _rank() == 1:
                over.touch()
                return
            until(lambda: met.exists() or left.exists(), "rank 1")
            Path(folder, "released").write_text(str(time.monotonic()))

    dist.barrier = noted_barrier
    checkpointer = Held(url)
    checkpointer.save(1, {"weights": torch.ones(4)})
    try:
        checkpointer.leave()
    finally:
        Path(folder, f"left.{_rank()}").write_text(str(time.monotonic()))
