"""The reference: one torchrun per node with its c10d rendezvous, on the same script."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import psutil

from gpuctl.stacks.providers import processes
from tests.bench.ours import kill_at_once
from tests.bench.steplog import StepLog
from tests.waiting import TookTooLong, until

T = TypeVar("T")

_TUNED = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=1"
SCRIPT = Path(__file__).with_name("steps.py")


class Torchrun:
    """Nodes 0, 1, …; node 0, started first, hosts the store.

    ``inside(node)`` is what a command begins with to run on that node, ``address(node)`` its address.
    """

    def __init__(
        self,
        root: Path,
        *,
        nodes: str = "2:3",
        tuned: bool = False,
        inside: Callable[[int], Sequence[str]] = lambda _: (),
        address: Callable[[int], str] = lambda _: "127.0.0.1",
        env: dict[str, str] | None = None,
    ) -> None:
        self.root = root
        self.log = StepLog(root / "steps")
        self._inside = inside
        self._address = address
        self._env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **(env or {})}
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        # Any peer lost counts as a failure of the script, so it needs restarts to live on at all.
        self._options = ["--nnodes", nodes, "--nproc-per-node", "1", "--max-restarts", "100"]
        self._options += ["--rdzv-backend", "c10d", "--rdzv-id", "bench"]
        self._port = _free_port()
        self._options += ["--rdzv-endpoint", f"{address(0)}:{self._port}"]
        self._tuned = tuned
        if tuned:
            self._env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"

    def start(self, node: int) -> None:
        folder = self.root / f"node-{node}"
        folder.mkdir(parents=True)
        command = [*self._inside(node), sys.executable, "-m", "torch.distributed.run", *self._options]
        if conf := self._conf(node):
            command += ["--rdzv-conf", conf]
        command += ["--local-addr", self._address(node), str(SCRIPT)]
        command += ["--marks", str(self.log.path), "--checkpoint", str(self.root / "checkpoint")]
        with (folder / "log").open("wb") as output:
            self._processes[node] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**self._env, processes.MARK: str(folder)},
                start_new_session=True,
            )

    def is_hosted(self) -> bool:
        """The port of the rendezvous is taken: on one machine, the first torchrun that comes hosts the store."""
        if ended := self.exit_codes():
            raise RuntimeError(f"torchrun ended with {ended}: {self.said(0)}")
        if self._inside(0):
            return True  # on a network of its own, the one with that address hosts it
        sockets = psutil.net_connections("tcp")
        return any(s.laddr and s.laddr.port == self._port and s.status == psutil.CONN_LISTEN for s in sockets)

    def _conf(self, node: int) -> str:
        # In a namespace the host's name leads to another address, so torchrun must be told who hosts the store.
        host = [f"is_host={int(node == 0)}"] if self._inside(0) else []
        return ",".join([*host, *([_TUNED] if self._tuned else [])])

    def kill(self, node: int) -> float:
        """Everything on the node at once; returns the moment it began (monotonic)."""
        at = kill_at_once(self.root / f"node-{node}")
        self._processes.pop(node).wait()
        return at

    def said(self, node: int) -> str:
        return (self.root / f"node-{node}" / "log").read_text(errors="replace").strip()[-300:]

    def exit_codes(self) -> dict[int, int] | None:
        """How the nodes ended; ``None`` as long as one runs."""
        codes = {node: process.poll() for node, process in self._processes.items()}
        return None if None in codes.values() else {node: code for node, code in codes.items() if code is not None}

    def end(self) -> None:
        processes.kill_all(self.root)
        for process in self._processes.values():
            process.wait()


@contextlib.contextmanager
def torchrun(root: Path, nodes: Sequence[int], **options: object) -> Iterator[Torchrun]:
    """``nodes`` of them, in a folder of their own, making steps; whatever happens, nothing is left."""
    folder = root / f"torchrun-{time.monotonic_ns()}"
    folder.mkdir(parents=True)
    job = Torchrun(folder, **options)  # type: ignore[arg-type]
    try:
        for node in nodes:
            job.start(node)
            if node == 0:
                until(job.is_hosted, "the store of torchrun's rendezvous")
        job.log.wait_for_steady(len(nodes), patience_s=120)
        yield job
    finally:
        job.end()
        shutil.rmtree(folder, ignore_errors=True)


def attempted(measure: Callable[[], T]) -> T | str:
    """What ``measure`` says, or why it could not: trouble with the reference must not cost our own number."""
    try:
        return measure()
    except (TookTooLong, RuntimeError, OSError) as error:
        return f"failed: {error}"


def _free_port() -> int:
    """torchrun takes no listening socket, so this one may be lost to somebody else; then it fails and says so."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port
