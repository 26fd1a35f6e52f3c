"""Pods: processes of ``gpuctl mingle``, each in a network namespace of its own, with a bucket that all reach."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from gpuctl.bootstrap.identity import NodeIdentity
from gpuctl.cluster import layout
from gpuctl.cluster.records.clusters import ClusterSpec
from gpuctl.cluster.records.codec import encode
from gpuctl.cluster.storage.bucket import open_bucket
from gpuctl.stacks.providers import processes
from tests.bench.network import Network
from tests.bench.ours import Cluster
from tests.bench.steplog import Mark, StepLog
from tests.waiting import PATIENCE_S, TookTooLong, until

LOCKSTEP, TORCH_LOCKSTEP = (Path(__file__).with_name(name) for name in ("lockstep.py", "torch_lockstep.py"))
GPUCTL = (sys.executable, "-m", "gpuctl.cli.main")


class NoStep(Exception):
    """What became of the pods instead."""


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
        self.patience_s = PATIENCE_S
        self.env = {"OMP_NUM_THREADS": "1"}
        root.mkdir(parents=True, exist_ok=True)

    def start(self, machine: int, *more: str, command: Sequence[str] | None = None) -> None:
        """A pod on that machine; by default it makes steps with the others."""
        folder = self._root / f"{self._run}-pod-{machine}"
        folder.mkdir(exist_ok=True)
        with (folder / "out").open("ab") as output:
            self._pods[machine] = subprocess.Popen(
                [*self.net.inside(machine), *self._line(machine, more, command)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **self.env, processes.MARK: str(folder)},
                start_new_session=True,
            )

    def _line(self, machine: int, more: Sequence[str], command: Sequence[str] | None) -> list[str]:  # noqa: ARG002
        command = [sys.executable, str(LOCKSTEP), str(self.log.path)] if command is None else command
        asked = ["mingle", "--id", self._run, "--nodes", self._size, "--bucket", self._url, "--grace", "5", *more]
        return [*GPUCTL, *asked, *(["--", *command] if command else [])]

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
        """When the first step of a worker that is not one of ``old`` was made. Raises ``NoStep``."""

        def found() -> Mark | None:
            mark = self.log.first_step_of_new(old)
            if mark is None and all(pod.poll() is not None for pod in self._pods.values()):
                raise NoStep("all pods ended")
            return mark

        try:
            return until(found, "a step of the next round", self.patience_s).at
        except TookTooLong as error:
            raise NoStep(f"no step in {self.patience_s:g} s") from error

    def end(self) -> None:
        for machine in self.machines():
            self.kill(machine)

    def _has(self, machine: int, pid: int) -> bool:
        mark = f"{processes.MARK}={self._root / f'{self._run}-pod-{machine}'}".encode()
        with contextlib.suppress(OSError):
            return mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return False


class Torchruns(Pods):
    """The same of torchrun, with one of its backends in place of ``gpuctl mingle``."""

    backend = "gpuctl"

    def _line(self, machine: int, more: Sequence[str], command: Sequence[str] | None) -> list[str]:
        flags = {"backend": self.backend, "endpoint": self._endpoint(), "id": self._run, **self._conf(machine)}
        return [
            *(sys.executable, "-m", "torch.distributed.run", *(f"--rdzv-{name}={is_}" for name, is_ in flags.items())),
            *(f"--nnodes={self._size}", "--nproc-per-node=1", f"--max-restarts={self.max_restarts}", *more),
            f"--local-addr={self.net.address(machine)}",
            *(command or (str(TORCH_LOCKSTEP), str(self.log.path))),
        ]

    max_restarts = 0

    def _endpoint(self) -> str:
        return self._url

    def _conf(self, machine: int) -> dict[str, str]:  # noqa: ARG002
        return {}


class C10d(Torchruns):
    """torchrun with its own backend, whose store is on the first machine, and with as many restarts as it needs."""

    backend = "c10d"
    max_restarts = 100

    def start(self, machine: int, *more: str, command: Sequence[str] | None = None) -> None:
        self._first = machine if self._first is None else self._first
        super().start(machine, *more, command=command)

        self.env["GLOO_SOCKET_IFNAME"] = "eth0"

    _first: int | None = None

    def _endpoint(self) -> str:
        assert self._first is not None
        return f"{self.net.address(self._first)}:29400"

    def _conf(self, machine: int) -> dict[str, str]:
        # In a namespace the host's name leads to another address, so torchrun must be told who hosts the store.
        return {"conf": f"is_host={int(machine == self._first)}"}


class Agents(Pods):
    """Nodes of a cluster, with defaults as in a cloud, whose job is the same script under ``gpuctl train``."""

    def __init__(self, net: Network, url: str, root: Path, run: str, size: str) -> None:
        super().__init__(net, url, root, run, size)
        prefix, _, options = url.partition("?")
        self._url = f"{prefix}/{run}?{options}"
        bucket = open_bucket(self._url)
        fewest, _, most = size.rpartition(":")
        spec = ClusterSpec(
            name="bench",
            provider="bench",
            nodes_min=int(fewest or most),
            nodes_max=int(most),
            token=secrets.token_hex(16),
        )
        bucket.create(layout.CLUSTER, encode(spec))
        Cluster(bucket, root).submit(TORCH_LOCKSTEP, [str(self.log.path)], root)

    def _line(self, machine: int, more: Sequence[str], command: Sequence[str] | None) -> list[str]:  # noqa: ARG002
        folder = self._root / f"{self._run}-pod-{machine}"
        env = {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        identity = NodeIdentity(
            node=f"node-{machine}", address=self.net.address(machine), bucket=self._url, provider="bench", env=env
        )
        (folder / "identity.json").write_bytes(msgspec.json.encode(identity))
        return [sys.executable, "-m", "gpuctl.bootstrap.agent", str(folder)]


@contextlib.contextmanager
def pods(net: Network, url: str, root: Path, run: str, size: str, kind: type[Pods] = Pods) -> Iterator[Pods]:
    made = kind(net, url, root, run, size)
    try:
        yield made
    finally:
        made.end()
