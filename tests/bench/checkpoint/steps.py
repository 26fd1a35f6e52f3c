"""What a training thread feels while a save is in flight: its steps, and the interpreter's lock.

The training thread has one core for itself; the contender's threads share another one with the server, which yields to
them (see ``storage.Server.on_core``). A machine that trains has cores for all of them, where two must do here; so this
measures what a save does to the training by the interpreter's lock and the memory bus, and not what a lack of cores
does.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import torch
from torch import nn

from tests.bench.checkpoint.contenders import Contender

_CORES = sorted(os.sched_getaffinity(0))
TRAINING_CORE, OTHER_CORE = _CORES[0], _CORES[-1]
TICK_S = 0.001


class Training:
    """A loop whose step is about 10 ms of work on one core, in some hundred calls from Python, as real ones are."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = [layer for _ in range(9) for layer in (nn.Linear(256, 256), nn.GELU())]
        self._model = nn.Sequential(*layers)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), foreach=False)
        self._batch = torch.randn(128, 256)
        for _ in range(20):
            self.step()

    def step(self) -> float:
        """Seconds that it took."""
        began = time.perf_counter()
        self._optimizer.zero_grad()
        self._model(self._batch).square().mean().backward()
        self._optimizer.step()
        return time.perf_counter() - began


def undisturbed(training: Training, count: int) -> list[float]:
    """Seconds of each of ``count`` steps."""
    with _alone_on_its_core():
        return [training.step() for _ in range(count)]


def disturbed(training: Training, contender: Contender, first: int, count: int) -> tuple[list[float], int]:
    """At least ``count`` steps that were begun and ended while a save was in flight, one save after the other from step
    ``first`` on, each until its end; and how many saves. The call that begins one is no part of it: that is a row of
    its own."""
    found: list[float] = []
    saves = 0
    while len(found) < count:
        with _in_flight(contender, first + saves) as goes_on:
            while goes_on():
                took = training.step()
                if goes_on():
                    found.append(took)
        saves += 1
    return found, saves


def idle_gaps(seconds: float) -> list[float]:
    """Seconds between ticks while nothing else happens in this process."""
    with _alone_on_its_core(), _Ticks() as ticks:
        time.sleep(seconds)
    return ticks.gaps


def save_gaps(contender: Contender, step: int) -> list[float]:
    """Seconds between ticks from the call that begins a save to its end. Nobody trains: the lock is the save's."""
    with _Ticks() as ticks, _in_flight(contender, step) as goes_on:
        while goes_on():
            time.sleep(0.02)
    return ticks.gaps


@contextmanager
def _in_flight(contender: Contender, step: int) -> Iterator[Callable[[], bool]]:
    """Begin a save, and finish it in a thread; yields whether it goes on. Raises what it raised.

    It is begun on the other core, so that all threads that it starts stay there.
    """
    contender.model.change()
    errors: list[BaseException] = []

    def finish() -> None:
        try:
            contender.finish()
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    thread = threading.Thread(target=finish, name="finish")
    with _on(OTHER_CORE):
        contender.begin(step)
        thread.start()
    with _alone_on_its_core():
        yield thread.is_alive
        thread.join()
    if errors:
        raise errors[0]
    contender.delete_unneeded()


@contextmanager
def _alone_on_its_core() -> Iterator[None]:
    """The calling thread on one core, all others (but a ticker) on the other one."""
    for thread in _thread_ids() - {threading.get_native_id()} - _Ticks.threads:
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(thread, {OTHER_CORE})
    with _on(TRAINING_CORE):
        yield


@contextmanager
def _on(core: int) -> Iterator[None]:
    """The calling thread, and those that it starts meanwhile."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def _thread_ids() -> set[int]:
    """Of all threads of this process, also those that Python does not know."""
    return {int(path.name) for path in Path("/proc/self/task").iterdir()}


class _Ticks:
    """A thread that sleeps 1 ms at a time. Where the kernel lets it, it runs before all others on its core: then what
    makes it late is that it waits for the interpreter's lock, and what the kernel adds is in ``idle_gaps`` as well."""

    threads: ClassVar[set[int]] = set()

    def __init__(self) -> None:
        self.gaps: list[float] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._tick, name="ticker")

    def __enter__(self) -> _Ticks:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _tick(self) -> None:
        self.threads.add(threading.get_native_id())
        os.sched_setaffinity(0, {TRAINING_CORE})
        with contextlib.suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        last = time.perf_counter()
        while not self._over.is_set():
            time.sleep(TICK_S)
            now = time.perf_counter()
            self.gaps.append(now - last)
            last = now
