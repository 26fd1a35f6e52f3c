"""One contender in a process of its own, which does what it is asked through a pipe.

python tests/bench/checkpoint/contestant.py FD NAME SIZE ENDPOINT BUCKET PREFIX
"""

from __future__ import annotations

import re
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[3])

import torch

from tests.bench.checkpoint import memory_guard, steps
from tests.bench.checkpoint.contenders import MAKERS, Contender
from tests.bench.checkpoint.storage import Place


class Contestant:
    """Every method is a request; what it returns is the answer."""

    def __init__(self, contender: Contender) -> None:
        self._contender = contender
        self._model = contender.model
        self._training: steps.Training | None = None
        self._saves = 0
        self._saved = ""

    def save(self, keep: bool) -> tuple[float, float]:
        """Seconds until training may go on, and until all is in the bucket, which need not ``keep`` it."""
        self._model.change()
        self._saved = self._model.digest()
        began = time.perf_counter()
        self._contender.begin(self._next_step())
        blocked = time.perf_counter() - began
        self._contender.finish()
        took = time.perf_counter() - began
        if not keep:
            self._contender.delete_unneeded()
        return blocked, took

    def read(self) -> float:
        """Seconds."""
        self._model.wipe()
        began = time.perf_counter()
        self._contender.read()
        return time.perf_counter() - began

    def verify(self) -> float:
        """Restore, and compare every bit. Seconds of the restore; raises ``ValueError``."""
        self._model.wipe()
        began = time.perf_counter()
        self._contender.restore()
        took = time.perf_counter() - began
        if self._model.digest() != self._saved:
            raise ValueError("what came back is not what was saved")
        return took

    def undisturbed(self, count: int) -> list[float]:
        return steps.undisturbed(self._trained(), count)

    def disturbed(self, count: int) -> list[float]:
        found, saves = steps.disturbed(self._trained(), self._contender, self._next_step(), count)
        self._saves += saves - 1
        self._saved = self._model.digest()
        return found

    def idle_gaps(self, seconds: float) -> list[float]:
        return steps.idle_gaps(seconds)

    def save_gaps(self) -> list[float]:
        found = steps.save_gaps(self._contender, self._next_step())
        self._saved = self._model.digest()
        return found

    def memory_of_save(self) -> int:
        return _peak_beyond(lambda: self.save(True))

    def memory_of_read(self) -> int:
        return _peak_beyond(self.read)

    def _next_step(self) -> int:
        self._saves += 1
        return self._saves

    def _trained(self) -> steps.Training:
        self._training = self._training or steps.Training()
        return self._training


def _peak_beyond(call: Callable[[], object]) -> int:
    """Bytes by which this process was larger at some moment of ``call`` than before it. That is the kernel's own
    high-water mark of what is resident: unlike samples, it misses nothing."""
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident("VmRSS")
    call()
    return _resident("VmHWM") - before


def _resident(which: str) -> int:
    found = re.search(rf"^{which}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def main(fd: str, name: str, size: str, endpoint: str, bucket: str, prefix: str) -> None:
    memory_guard.go_first()
    torch.set_num_threads(1)
    requests = Connection(int(fd))
    contestant = Contestant(MAKERS[name](int(size), Place(endpoint, bucket, prefix)))
    requests.send((None, None))
    while True:
        try:
            what, arguments = requests.recv()
        except EOFError:
            return
        try:
            requests.send((getattr(contestant, what)(*arguments), None))
        except BaseException as error:  # noqa: BLE001 - DCP's errors are no Exception; raised where it was asked for
            traceback.print_exc()
            requests.send((None, f"{type(error).__name__}: {error}"))


if __name__ == "__main__":
    main(*sys.argv[1:])
