"""A whole cluster through the real command line: real agents, real torchrun workers, really killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from gpuctl.cluster import layout
from gpuctl.cluster.agreement import ledgers
from gpuctl.cluster.jobs import queue
from gpuctl.cluster.records.checkpoints import CheckpointIndex
from gpuctl.cluster.records.codec import decode
from gpuctl.cluster.records.nodes import NodeRecord
from gpuctl.cluster.records.rounds import Round
from gpuctl.cluster.storage.bucket import Bucket, open_bucket
from gpuctl.stacks.providers import processes
from tests.leftovers import RUN
from tests.waiting import PATIENCE_S

T = TypeVar("T")

LEASE_S = 30.0
"""Of the clusters here, where `local` has 3 s: a busy machine may starve an agent for so long, and a node that is
taken for lost costs a round that no test counts with. A node that is killed is known by its broken connections."""
_UP = """
import sys
from gpuctl.stacks.providers import local
local.LEASE_S = float(sys.argv.pop(1))
from gpuctl.cli.main import main
main()
"""


class Cluster:
    """One user's machine: a state directory, a folder with scripts, and ``gpuctl``."""

    def __init__(self, state: Path, folder: Path) -> None:
        self.state = state
        self.folder = folder
        self.folder.mkdir(exist_ok=True)
        self.name = "default"
        self.command = [sys.executable, "-m", "gpuctl.cli.main"]
        """What gpuctl is here; a test may put something before it."""
        self.lease_s = LEASE_S
        self.env = {
            **{k: v for k, v in os.environ.items() if not k.startswith("GPUCTL_") or k == RUN},
            "GPUCTL_STATE_DIR": str(state),
            "NO_COLOR": "1",
            "COLUMNS": "120",
        }

    def write(self, name: str, text: str) -> str:
        (self.folder / name).write_text(textwrap.dedent(text))
        return name

    def run(self, *args: str, code: int | None = 0, timeout: float = PATIENCE_S) -> subprocess.CompletedProcess[str]:
        """``gpuctl args``; fails the test unless it exits with ``code`` (``None``: any)."""
        return self._run([*self.command, *args], code, timeout)

    def _run(self, command: Sequence[str], code: int | None, timeout: float) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self.env,
            text=True,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=timeout,
        )
        if code is not None and done.returncode != code:
            pytest.fail(f"{' '.join(command)} exited {done.returncode}\n{done.stdout}\n{done.stderr}")
        return done

    def start(self, *args: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*self.command, *args],
            cwd=self.folder,
            env=self.env,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def up(self, nodes: str, *args: str) -> None:
        """``gpuctl up``, until all nodes can begin at once and rank 0 knows them: the first round then has them all.
        For the usual cluster and bucket only."""
        python = self.command[:-2]
        self._run([*python, "-c", _UP, str(self.lease_s), "up", "--nodes", nodes, *args], 0, PATIENCE_S)
        wanted = int(nodes.rpartition(":")[2])
        self.wait(lambda: self._warm_and_known() == wanted, f"{wanted} warm nodes that rank 0 knows")

    def _warm_and_known(self) -> int:
        nodes = self.nodes()
        views = [record.view for record in nodes.values() if record.view]
        return sum(record.ready and any(view.get(record.node) == "live" for view in views) for record in nodes.values())

    def train(self, script: str, *args: str) -> str:
        """Start a job and leave it; returns its id."""
        done = self.run("train", "-d", script, *args)
        return self.newest_job() or pytest.fail(done.stdout)

    # -- what the bucket says -----------------------------------------------------------------------------------------

    @property
    def bucket(self) -> Bucket:
        return open_bucket(f"file://{self.state}/buckets/{self.name}")

    def newest_job(self) -> str | None:
        return queue.newest(self.bucket)

    def nodes(self) -> dict[str, NodeRecord]:
        keys = [entry.key for entry in self.bucket.list(layout.NODES)]
        found = [(key, self.bucket.get(key)) for key in keys]
        return {record.node: record for key, data in found if data and (record := decode(data, NodeRecord, key))}

    def rank0(self) -> str:
        return next(record.node for record in self.nodes().values() if record.view)

    def history(self, job: str) -> list[Round]:
        """Every entry of the job's ledger but those of its time in line."""
        entries = [version.value for version in ledgers.rounds(self.bucket, job).history()]
        return [entry for entry in entries if entry and entry.number > 0]

    def now(self, job: str) -> Round | None:
        return ledgers.rounds(self.bucket, job).read().value

    def step(self, job: str, number: int | None = None) -> int:
        """The furthest step that some node's heartbeat tells of; of round ``number`` if given."""
        told = [r.progress for r in self.nodes().values() if r.progress and r.progress.job == job]
        return max((p.step for p in told if number is None or p.round == number), default=-1)

    def checkpoints(self, job: str) -> CheckpointIndex:

        ledger = ledgers.checkpoints(self.bucket, job)
        return ledger.read().value or CheckpointIndex()

    def metrics(self, job: str) -> list[dict[str, Any]]:
        from gpuctl.cluster.storage.streams import StreamReader

        return [line for _, _, line in StreamReader(self.bucket, layout.metrics(job)).read()]

    # -- waiting ------------------------------------------------------------------------------------------------------

    def wait(self, condition: Callable[[], T | None], what: str, timeout: float = PATIENCE_S) -> T:
        deadline = time.monotonic() + timeout
        while not (found := condition()):
            if time.monotonic() > deadline:
                pytest.fail(f"waited {timeout:g} s for: {what}")
            time.sleep(0.02)
        return found

    def wait_for_step(self, job: str, step: int, number: int | None = None) -> None:
        self.wait(lambda: self.step(job, number) >= step, f"{job} to reach step {step} in round {number}")

    def wait_for_end(self, job: str, timeout: float = PATIENCE_S) -> Round:
        self.wait(lambda: (r := self.now(job)) and r.phase == "ended", f"{job} to end", timeout)
        ended = self.now(job)
        assert ended is not None
        return ended

    # -- violence -----------------------------------------------------------------------------------------------------

    def node_dir(self, node: str) -> Path:
        return self.state / "local" / self.name / "nodes" / node

    def kill(self, node: str) -> None:
        """Power loss: everything on the node at once."""
        assert processes.kill_all(self.node_dir(node)) == []

    @contextlib.contextmanager
    def notice(self, node: str, *args: str) -> Iterator[None]:
        """``gpuctl preempt`` with a long notice: inside, ``node`` has got it; afterwards, the node is gone."""
        taking = self.start("preempt", node, "--notice", "120", *args)
        self.wait(lambda: self.nodes()[node].notice, f"{node} to know of its notice")
        yield
        said, _ = taking.communicate(timeout=PATIENCE_S)
        assert taking.returncode == 0, said

    def signal_all(self, node: str, number: signal.Signals) -> None:
        for process in processes.marked_processes(self.node_dir(node)):
            process.send_signal(number)

    def end(self) -> None:
        processes.kill_all(self.state / "local")


def as_json(done: subprocess.CompletedProcess[str]) -> Any:
    return json.loads(done.stdout)


def as_json_lines(done: subprocess.CompletedProcess[str]) -> list[Any]:
    return [json.loads(line) for line in done.stdout.splitlines()]
