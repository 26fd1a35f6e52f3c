"""A gpuctl cluster under measurement: real agents, a real bucket, jobs put in line as the command line does it."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from gpuctl.cluster import layout
from gpuctl.cluster.agreement import ledgers
from gpuctl.cluster.jobs import queue
from gpuctl.cluster.jobs.code_archive import packed, upload
from gpuctl.cluster.jobs.code_survey import survey
from gpuctl.cluster.records.codec import decode
from gpuctl.cluster.records.nodes import NodeRecord
from gpuctl.cluster.records.rounds import JobOutcome, Round
from gpuctl.cluster.storage.bucket import Bucket, open_bucket
from gpuctl.stacks.providers import processes
from gpuctl.stacks.providers.interface import Dialog, UpRequest
from gpuctl.stacks.providers.local import LocalProvider
from gpuctl.stacks.state.clusters import KnownCluster
from tests.waiting import until


class Cluster:
    """What its bucket tells, and the folders of its nodes."""

    def __init__(self, bucket: Bucket, nodes: Path) -> None:
        self.bucket = bucket
        self.nodes_dir = nodes

    def submit(self, script: Path, args: Sequence[str], scratch: Path) -> str:
        """Put a job in line whose folder holds ``script`` alone; returns its id."""
        folder = scratch / f"code-{time.monotonic_ns()}"
        folder.mkdir(parents=True)
        shutil.copy(script, folder)
        with packed(survey(folder)) as code:
            upload(self.bucket, code)
            request = queue.JobRequest(script=script.name, code=code.digest, args=tuple(args))
            return queue.submit(self.bucket, queue.cluster_spec(self.bucket), request).job

    def end(self, job: str) -> None:
        """Ask for the job's end and see it."""
        queue.ask_to_cancel(self.bucket, job)
        self.outcome(job)

    def outcome(self, job: str, patience_s: float = 120.0) -> JobOutcome:
        return until(lambda: queue.outcome(self.bucket, job), f"{job} to end", patience_s)

    def rank0(self) -> str:
        ledger = ledgers.lease(self.bucket)
        return until(lambda: ledger.read().value, "a rank 0").node

    def records(self) -> dict[str, NodeRecord]:
        keys = [entry.key for entry in self.bucket.list(layout.NODES)]
        found = [(key, self.bucket.get(key)) for key in keys]
        return {record.node: record for key, data in found if data and (record := decode(data, NodeRecord, key))}

    def wait_for_world(self, job: str, nodes: int, patience_s: float = 60.0) -> Round:
        def running() -> Round | None:
            now = ledgers.rounds(self.bucket, job).read().value
            return now if now and now.phase == "run" and len(now.members) == nodes else None

        return until(running, f"a round of {nodes} nodes", patience_s)

    def decided_at(self, job: str, number: int) -> float:
        """When round ``number`` was decided, by the machine's monotonic clock."""
        entries = [version.value for version in ledgers.rounds(self.bucket, job).history()]
        at = next(entry.at for entry in entries if entry and entry.number == number)
        return at - time.time() + time.monotonic()

    def step(self, job: str, number: int = 0) -> int:
        """The furthest step that a node's heartbeat tells of, in round ``number`` or later."""
        told = [r.progress for r in self.records().values() if r.progress and r.progress.job == job]
        return max((p.step for p in told if p.round >= number), default=0)

    def kill(self, node: str) -> float:
        """Power loss: everything on the node at once. Returns the moment it began (monotonic)."""
        return kill_at_once(self.nodes_dir / node)


class LocalCluster(Cluster):
    """What ``gpuctl up`` makes."""

    def __init__(self, state: Path, nodes: tuple[int, int], bucket: str | None) -> None:
        os.environ["GPUCTL_STATE_DIR"] = str(state)
        self._provider = LocalProvider("local", Dialog())
        self._request = UpRequest(name="bench", nodes_min=nodes[0], nodes_max=nodes[1], bucket=bucket)
        self.known: KnownCluster = self._provider.up(self._request)
        super().__init__(open_bucket(self.known.bucket), state / "local" / "bench" / "nodes")

    def up(self) -> None:
        """Start what is missing."""
        self._provider.up(self._request)

    def is_taken(self, node: str) -> bool:
        return processes.noted_process(self.nodes_dir / node) is None

    def preempt(self, node: str, notice_s: float, replace_after_s: float | None = None) -> None:
        self._provider.preempt(self.known, node, notice_s, replace_after_s)

    def down(self) -> None:
        self._provider.down(self.known)


@contextlib.contextmanager
def local_cluster(root: Path, nodes: tuple[int, int], bucket: str | None = None) -> Iterator[LocalCluster]:
    """In a folder of its own; whatever happens, nothing of it is left but what is in a ``bucket`` elsewhere."""
    state = root / f"state-{time.monotonic_ns()}"
    try:
        cluster = LocalCluster(state, nodes, bucket)
        yield cluster
        cluster.down()
    finally:
        processes.kill_all(state)
        shutil.rmtree(state, ignore_errors=True)


def kill_at_once(folder: Path) -> float:
    """SIGKILL to all processes of a node, found beforehand. Returns the moment before the first (monotonic)."""
    found = processes.marked_processes(folder)
    at = time.monotonic()
    for process in found:
        with contextlib.suppress(psutil.Error):
            process.kill()
    processes.kill_all(folder)
    return at
