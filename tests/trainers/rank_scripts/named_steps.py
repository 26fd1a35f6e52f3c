"""What the ranks of the fault tests run: a restore and a save whose every step has a name, and one may be their last.

A *point* is a place in a rank's way: just before it asks the store for something, just after the answer has come, and
likewise before and after each meeting with the other ranks. Points are counted by name, so that they are the same ones
in every run.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from gpuctl import Checkpointer
from gpuctl.cluster.storage.bucket import open_bucket
from gpuctl.cluster.storage.interface import Entry, PartStore
from gpuctl.trainers.checkpoint.save.store_gather import StoreGather

Who = Literal["itself", "others", "all"]


def at_step(step: int) -> dict[str, Any]:
    """The state after ``step`` steps, wherever it is asked for. Nothing random is drawn, so from one step to the next
    the generators' part stays as it is, and is referred to instead of written."""
    model = nn.Sequential(nn.Linear(31, 7, device="meta"), nn.Linear(7, 3, device="meta")).to_empty(device="cpu")
    drawn = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=drawn))
    return {"model": model, "step": step}


def is_at(step: int, state: dict[str, Any]) -> bool:
    """Whether ``state`` is that of ``step``, to the last bit."""
    ours, theirs = at_step(step), state
    weights, other = ours["model"].state_dict(), theirs["model"].state_dict()
    return ours["step"] == theirs["step"] and all(torch.equal(weights[name], other[name]) for name in weights)


# -- points -----------------------------------------------------------------------------------------------------------


class Points:
    """The points of one rank so far. At the one named ``fatal``, ``strike`` is called."""

    def __init__(self, fatal: str, strike: Callable[[], None]) -> None:
        self.passed: list[str] = []
        self._fatal = fatal
        self._strike = strike
        self._counted: Counter[str] = Counter()
        self._lock = threading.Lock()

    def reach(self, name: str) -> None:
        with self._lock:
            self._counted[name] += 1
            numbered = f"{name} #{self._counted[name]}"
            self.passed.append(numbered)
        if numbered == self._fatal:
            self._strike()


class PointStore:
    """A store with a point before and after each request."""

    def __init__(self, store: PartStore, points: Points) -> None:
        self._store = store
        self._points = points

    def get(self, key: str) -> bytes | None:
        with self._request("get", key):
            return self._store.get(key)

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        return [self.get(key) for key in keys]

    def get_range(self, key: str, start: int, end: int) -> memoryview:
        with self._request("get_range", key):
            return self._store.get_range(key, start, end)

    def stream(self, key: str, start: int, end: int) -> Iterator[memoryview]:
        with self._request("stream", key):
            yield from self._store.stream(key, start, end)

    def put(self, key: str, data: bytes | memoryview) -> None:
        with self._request("put", key):
            self._store.put(key, data)

    def create(self, key: str, data: bytes) -> bool:
        with self._request("create", key):
            return self._store.create(key, data)

    def list(self, prefix: str, after: str | None = None) -> list[Entry]:
        with self._request("list", prefix):
            return self._store.list(prefix, after)

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            with self._request("delete", key):
                self._store.delete([key])

    @contextmanager
    def _request(self, verb: str, key: str) -> Iterator[None]:
        name = f"{verb} {anonymous(key)}"
        self._points.reach(f"before {name}")
        yield
        self._points.reach(f"after {name}")


def anonymous(key: str) -> str:
    """Without what is drawn anew by each start of the workers."""
    return re.sub(r"(-r\d+)\.[0-9a-f]+-", r"\1.*-", key)


def _code(function: Callable[..., Any]) -> CodeType:
    code: CodeType = inspect.unwrap(function).__code__
    return code


VERBS = ("get", "stream", "put", "create", "list", "delete")
_MEETINGS = {
    _code(function): function.__qualname__
    for function in (
        dist.new_group,
        dist.all_gather,
        dist.broadcast,
        StoreGather.exchange,
        StoreGather.answer,
        StoreGather.outcome,
    )
}
MEETINGS = tuple(_MEETINGS.values())


@contextmanager
def watched(points: Points) -> Iterator[None]:
    """A point before and after each meeting of the ranks, in all threads that begin meanwhile."""

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event in ("call", "return") and frame.f_code in _MEETINGS:
            points.reach(f"{'before' if event == 'call' else 'after'} {_MEETINGS[frame.f_code]}")

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


# -- what ranks run ---------------------------------------------------------------------------------------------------


def save_steps(url: str, steps: Sequence[int], base: int = 0, keep: int | None = 1) -> int | None:
    """Restore, and save each of ``steps``. Returns what was found. Another ``base`` makes other states."""
    checkpointer, state = Checkpointer(store=open_bucket(url), keep=keep), at_step(0)
    found = checkpointer.restore(state)
    assert found is None or is_at(base + found, state)
    for step in steps:
        checkpointer.save(step, at_step(base + step))
        checkpointer.wait()
    return found


def save_drawn(url: str, step: int) -> None:
    """As ``save_steps``, with generators that have gone on."""
    checkpointer, state = Checkpointer(store=open_bucket(url), keep=None), at_step(0)
    checkpointer.restore(state)
    torch.rand(1)
    checkpointer.save(step, at_step(step))
    checkpointer.wait()


def save_two_more(url: str) -> int:
    """Restore, and save the next two steps. Returns what was found."""
    checkpointer, state = Checkpointer(store=open_bucket(url), keep=1), at_step(0)
    found = checkpointer.restore(state)
    assert found is not None and is_at(found, state)
    for step in (found + 1, found + 2):
        checkpointer.save(step, at_step(step))
        checkpointer.wait()
    return found


def go_on(
    urls: Sequence[str],
    rank: int = -1,
    fatal: str = "",
    who: Who = "itself",
    mark: str = "",
    number: int = signal.SIGKILL,
    further: int = 1,
) -> list[str]:
    """Restore, and save the step that is ``further``, at ``urls[own rank]``; the points of this rank. When ``rank``
    reaches ``fatal`` it writes that to the file ``mark``, and sends ``number`` to those whom ``who`` names."""
    me = dist.get_rank()
    pids: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())

    def strike() -> None:
        Path(mark).write_text(fatal)
        if who != "itself":
            for pid in pids[:me] + pids[me + 1 :]:
                with contextlib.suppress(ProcessLookupError):  # it has ended by itself
                    os.kill(pid, number)
        if who != "others":
            os.kill(os.getpid(), number)

    points = Points(fatal if rank == me else "", strike)
    checkpointer = Checkpointer(store=PointStore(open_bucket(urls[me]), points), keep=1)
    with watched(points):
        state = at_step(0)
        step = checkpointer.restore(state)
        assert step is not None and is_at(step, state)
        checkpointer.save(step + further, at_step(step + further))
        checkpointer.wait()
    return points.passed
