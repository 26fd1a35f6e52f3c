"""Pods: processes of ``gpuctl mingle``, each in a network namespace of its own, with a bucket that all reach."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from gpuctl.stacks.providers import processes
from tests.bench.network import Network
from tests.bench.steplog import StepLog
from tests.waiting import until

LOCKSTEP = Path(__file__).with_name("lockstep.py")
GPUCTL = (sys.executable, "-m", "gpuctl.cli.main")


class Pods:
    """Pods of one run. They and all that they start carry a mark, and are gone when the bench ends."""

    def __init__(self, net: Network, url: str, root: Path, run: str, size: str) -> None:
        self.net = net
        self.log = StepLog(root / f"{run}-steps")
        self._url = url
        self._root = root
        self._run = run
        self._size = size
        self._pods: dict[int, subprocess.Popen[bytes]] = {}
        root.mkdir(parents=True, exist_ok=True)

    def start(self, machine: int, *more: str, command: Sequence[str] | None = None) -> None:
        """A pod on that machine; by default it makes steps with the others."""
        folder = self._root / f"{self._run}-pod-{machine}"
        folder.mkdir(exist_ok=True)
        command = [sys.executable, str(LOCKSTEP), str(self.log.path)] if command is None else command
        asked = ["mingle", "--id", self._run, "--nodes", self._size, "--bucket", self._url, "--grace", "5", *more]
        with (folder / "out").open("ab") as output:
            self._pods[machine] = subprocess.Popen(
                [*self.net.inside(machine), *GPUCTL, *asked, *(["--", *command] if command else [])],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, processes.MARK: str(folder)},
                start_new_session=True,
            )

    def machines(self) -> list[int]:
        """Those with a pod, in the order of arrival."""
        return list(self._pods)

    def rank0(self) -> int:
        """The machine whose worker made the last step as rank 0."""
        last = next(mark for mark in reversed(self.log.steps()) if mark.rank == 0)
        return next(machine for machine in self._pods if self._has(machine, last.pid))

    def another(self) -> int:
        rank0 = self.rank0()
        return next(machine for machine in self._pods if machine != rank0)

    def kill(self, machine: int) -> float:
        """All of the pod at once; returns when."""
        at = time.monotonic()
        processes.kill_all(self._root / f"{self._run}-pod-{machine}")
        self._pods.pop(machine).wait()
        return at

    def ask_to_end(self, machine: int) -> None:
        self._pods[machine].send_signal(signal.SIGTERM)

    def exit_code(self, machine: int) -> int | None:
        return self._pods[machine].poll()

    def said(self, machine: int) -> str:
        return (self._root / f"{self._run}-pod-{machine}" / "out").read_text()

    def wait_for_end(self, machine: int) -> int:
        code = until(
            lambda: (self._pods[machine].poll(),) if self._pods[machine].poll() is not None else None, "an end"
        )
        return code[0] or 0

    def first_step_after(self, old: set[int]) -> float:
        """When the first step of a worker that is not one of ``old`` was made."""
        return until(lambda: self.log.first_step_of_new(old), "a step of the next round").at

    def end(self) -> None:
        for machine in self.machines():
            self.kill(machine)

    def _has(self, machine: int, pid: int) -> bool:
        mark = f"{processes.MARK}={self._root / f'{self._run}-pod-{machine}'}".encode()
        with contextlib.suppress(OSError):
            return mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return False


@contextlib.contextmanager
def pods(net: Network, url: str, root: Path, run: str, size: str) -> Iterator[Pods]:
    made = Pods(net, url, root, run, size)
    try:
        yield made
    finally:
        made.end()
