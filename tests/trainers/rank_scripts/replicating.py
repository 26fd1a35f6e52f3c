"""What the ranks of the tier tests run: each is the one worker of a node of its own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist

from gpuctl import Checkpointer
from gpuctl.bootstrap.agent.replica_server import ReplicaServer
from gpuctl.cluster.checkpoints import replica_layout
from gpuctl.cluster.records.rounds import Member, Round
from gpuctl.cluster.worker_context import TIERS, WorkerContext
from tests.trainers.rank_scripts import checkpointing

JOB = "job-1"


class Nodes:
    """Agents' folders and tier servers on this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._servers: dict[str, ReplicaServer] = {}
        self._ports: dict[str, int] = {}

    def start(self, *names: str) -> None:
        for name in names:
            self._servers[name] = ReplicaServer(self.folder / name / "jobs", "secret")
            self._ports[name] = self._servers[name].start("127.0.0.1")

    def stop(self) -> None:
        for server in self._servers.values():
            server.stop()

    def tier(self, name: str) -> Path:
        return self.folder / name / "jobs" / JOB / "tier"

    def copies(self, name: str) -> list[str]:
        """As ``<save>/<part>``."""
        return sorted(str(path.relative_to(self.tier(name))) for path in self.tier(name).glob("*/*"))

    def begin(self, number: int, names: Sequence[str]) -> list[dict[str, str]]:
        """A round of these nodes; each rank's environment."""
        members = tuple(
            Member(node=name, incarnation="i", address="127.0.0.1", nproc=1, tier_port=self._ports[name])
            for name in names
        )
        round_ = Round(job=JOB, number=number, phase="run", epoch=1, members=members)
        envs = []
        for rank, name in enumerate(names):
            place = self.folder / name / f"round-{number}"
            place.mkdir(parents=True)
            places = replica_layout.map_of(round_, rank, self.tier(name), "secret")
            (place / TIERS).write_bytes(msgspec.json.encode(places))
            bucket = f"file://{self.folder}/bucket"
            context = WorkerContext("demo", bucket, JOB, number, name, place, place, place)
            envs.append({**context.env(), "LOCAL_RANK": "0"})
        return envs


def _as_node(envs: list[dict[str, str]]) -> None:
    os.environ.update(envs[dist.get_rank() if dist.is_initialized() else 0])


def save_some(envs: list[dict[str, str]], steps: Sequence[int]) -> dict[str, Any]:
    """The state at the last of ``steps``."""
    _as_node(envs)
    state, checkpointer = checkpointing.training(), Checkpointer()
    at = checkpointer.restore(state) or 0
    for step in steps:
        checkpointing.train(state, step - at)
        at = step
        checkpointing.kept(checkpointer, step, state)
    return checkpointing.facts(state)


def save_unchanged(envs: list[dict[str, str]], step: int) -> dict[str, Any]:
    """Restore, and save the same as ``step``."""
    _as_node(envs)
    state, checkpointer = checkpointing.training(seed=1), Checkpointer()
    assert checkpointer.restore(state) is not None
    checkpointing.kept(checkpointer, step, state)
    return checkpointing.facts(state)


def restore(envs: list[dict[str, str]]) -> tuple[int | None, dict[str, Any]]:
    _as_node(envs)
    state = checkpointing.training(seed=1)
    step = Checkpointer().restore(state)
    return step, checkpointing.facts(state)
