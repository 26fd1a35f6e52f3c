"""A cluster that is only written: the records its agents would have put into the bucket, put there by a test."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec
from msgspec.structs import replace

from gpuctl.cluster import layout
from gpuctl.cluster.agreement import ledgers
from gpuctl.cluster.checkpoints import listing
from gpuctl.cluster.jobs import queue
from gpuctl.cluster.records.checkpoints import CheckpointEntry
from gpuctl.cluster.records.clusters import ClusterSpec
from gpuctl.cluster.records.codec import encode
from gpuctl.cluster.records.jobs import JobSpec
from gpuctl.cluster.records.nodes import NodeRecord, Rank0, TrainingProgress
from gpuctl.cluster.records.rounds import JobOutcome, Member, Phase, Round
from gpuctl.cluster.storage.bucket import open_bucket
from gpuctl.cluster.storage.streams import ChunkWriter
from gpuctl.stacks.state.clusters import KnownCluster
from tests.fakes.checkpoints import Maker, of_bytes


class WrittenCluster:
    """``name`` on the bucket at ``url``, known to the user whose state directory is ``home``/state."""

    def __init__(
        self, home: Path, url: str, *, nodes: tuple[int, int] = (2, 3), name: str = "default", provider: str = "local"
    ) -> None:
        self.home = home
        self.url = url
        self.store = open_bucket(url)
        self.spec = ClusterSpec(name=name, provider=provider, nodes_min=nodes[0], nodes_max=nodes[1], token="secret")
        self.store.create(layout.CLUSTER, encode(self.spec))
        self._streams: dict[str, ChunkWriter] = {}
        self.work = home / "work"
        self.work.mkdir(exist_ok=True)
        self.inside: list[str] = []
        """What the command line begins with, such as what enters a network namespace."""
        folder = home / "state" / "clusters"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.json").write_bytes(
            msgspec.json.encode(KnownCluster(name=name, provider=provider, bucket=url))
        )
        self.env = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("GPUCTL_", "_GPUCTL", "PYTHONUN"))},
            "GPUCTL_STATE_DIR": str(home / "state"),
            "NO_COLOR": "1",
        }

    # -- the command line ---------------------------------------------------------------------------------------------

    def run(self, *args: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        """``gpuctl args``, which must exit with ``code``."""
        process = self.start(*args)
        output, said = process.communicate(timeout=60)
        assert process.returncode == code, f"gpuctl {args} exited {process.returncode}\n{output}\n{said}"
        return subprocess.CompletedProcess(args, process.returncode, output, said)

    def start(self, *args: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*self.inside, sys.executable, "-m", "gpuctl.cli.main", *args],
            cwd=self.work,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    # -- what agents write --------------------------------------------------------------------------------------------

    def beat(self, node: str, **fields: object) -> NodeRecord:
        index = node.rpartition("-")[2]
        record = NodeRecord(node=node, incarnation=f"life-{index}", beat=1, address=f"127.0.0.{index}", port=1)
        record = replace(record, **fields)
        self.store.put(layout.node(node), encode(record))
        return record

    def lead(self, node: str, **fields: object) -> None:
        """``node`` is rank 0."""
        record = self.beat(node, **fields)
        ledger = ledgers.lease(self.store)
        leader = Rank0(node=node, incarnation=record.incarnation, address=record.address, port=record.port)
        assert ledger.commit(leader, ledger.read().number)

    def submit(self, script: str = "digits.py", args: tuple[str, ...] = ()) -> JobSpec:
        return queue.submit(self.store, self.spec, queue.JobRequest(script=script, args=args, submitted_by="ada@here"))

    def round(
        self,
        job: str,
        number: int,
        nodes: tuple[str, ...],
        *,
        phase: Phase = "run",
        reason: str = "job starts",
        outcome: JobOutcome | None = None,
    ) -> None:
        members = tuple(
            Member(node=n, incarnation=f"life-{n.rpartition('-')[2]}", address="127.0.0.1", nproc=1) for n in nodes
        )
        ledger = ledgers.rounds(self.store, job)
        entry = Round(
            job=job,
            number=number,
            phase=phase,
            epoch=1,
            members=members,
            reason=reason,
            outcome=outcome,
            at=time.time(),
        )
        assert ledger.commit(entry, ledger.read().number)

    def end(self, job: str, number: int, outcome: JobOutcome) -> None:
        self.round(job, number, (), phase="ended", outcome=outcome)

    def log(self, job: str, number: int, node: str, *lines: str, rank: int = 0, at: float = 0.0) -> None:
        said = [
            {"t": at + i / 1000, "rank": rank, "local_rank": 0, "stream": "stdout", "text": text}
            for i, text in enumerate(lines)
        ]
        self._append(layout.chunks(layout.logs(job), number, node), said)

    def metrics(self, job: str, number: int, node: str, *records: dict[str, float]) -> None:
        self._append(layout.chunks(layout.metrics(job), number, node), records)

    def _append(self, folder: str, records: Iterable[Mapping[str, object]]) -> None:
        writer = self._streams.setdefault(folder, ChunkWriter(self.store, folder))
        writer.append(b"".join(msgspec.json.encode(record) + b"\n" for record in records))

    def checkpoint(self, job: str, step: int, tensors: dict[str, bytes], number: int = 1) -> CheckpointEntry:
        """Of a model with these tensors."""
        state = {"model": {name: of_bytes(data) for name, data in tensors.items()}}
        return self.maker(job).save(step, state, number)

    def maker(self, job: str) -> Maker:
        return Maker(listing.folder(self.store, job))


def progress(job: str, step: int, number: int = 1, loss: float | None = None) -> TrainingProgress:
    return TrainingProgress(job=job, round=number, step=step, loss=loss, steps_per_s=10.0)
