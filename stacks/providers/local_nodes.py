"""Nodes that are processes on this machine: their folders, their addresses, their share of its GPUs and cores."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil

from gpuctl.bootstrap.identity import FILE, NodeIdentity
from gpuctl.cluster import layout
from gpuctl.cluster.atomic_write import write_atomic
from gpuctl.cluster.disk import full_disk
from gpuctl.cluster.errors import GpuctlError
from gpuctl.cluster.records.clusters import ClusterSpec
from gpuctl.cluster.records.codec import decode
from gpuctl.cluster.records.nodes import NodeRecord
from gpuctl.cluster.storage.bucket import Bucket, open_bucket
from gpuctl.stacks.providers import processes
from gpuctl.stacks.state import clusters
from gpuctl.stacks.state.paths import make_state_dir, state_dir

_READY_S = 60.0
_TAKEN = "taken"
"""A file in the folder of a node that was taken away: it does not come back."""


def node_count(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"


def cluster_of(folder: Path) -> tuple[Bucket, ClusterSpec]:
    bucket = open_bucket(NodeIdentity.read(folder).bucket)
    return bucket, decode(bucket.get(layout.CLUSTER) or b"", ClusterSpec, layout.CLUSTER)


def places(name: str) -> dict[str, tuple[Path, dict[str, str]]]:
    """The nodes that run: each one's folder and the environment that its workers get."""
    found = {}
    for folder in filter(is_up, node_dirs(name)):
        env = NodeIdentity.read(folder).env
        tools = f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"
        found[folder.name] = (folder, {**env, "PATH": tools, processes.MARK: str(folder)})
    return found


def root_of(name: str) -> Path:
    return state_dir() / "local" / name


def node_dirs(name: str) -> list[Path]:
    return sorted((root_of(name) / "nodes").glob("node-*"), key=_index)


def _index(folder: Path) -> int:
    return int(folder.name.removeprefix("node-"))


def is_up(folder: Path) -> bool:
    return processes.noted_process(folder) is not None


def may_restart(folder: Path) -> bool:
    """It died by itself (a crash, a reboot of this machine) and was not taken away."""
    return not is_up(folder) and not (folder / _TAKEN).exists()


def ended_nodes(name: str) -> list[str]:
    """Names of the nodes that have ended by themselves, which the next ``up`` starts again."""
    return [folder.name for folder in node_dirs(name) if may_restart(folder)]


def why_ended(name: str) -> str:
    """What has become of a cluster's nodes, and what brings them back, for a person; empty if none has ended."""
    there = [folder for folder in node_dirs(name) if is_up(folder) or may_restart(folder)]
    ended = [folder for folder in there if not is_up(folder)]
    if not ended:
        return ""
    have = "has" if len(ended) == 1 else "have"
    restarted = " (this machine was restarted)" if any(map(processes.is_of_earlier_boot, ended)) else ""
    again = "it" if len(ended) == 1 else "them"
    return (
        f"{len(ended)} of {node_count(len(there))} {have} ended{restarted};"
        f" `{clusters.command('up', name)}` starts {again} again"
    )


def new_node_dir(name: str, reserved: list[Path]) -> Path:
    index = 1 + max((_index(folder) for folder in [*node_dirs(name), *reserved]), default=-1)
    folder = root_of(name) / "nodes" / f"node-{index}"
    folder.mkdir(parents=True, mode=0o700)
    return folder


def write_identities(folders: list[Path], url: str, spec: ClusterSpec, gpus: int, *, beside: list[Path]) -> None:
    """Write the nodes' identities. That of a node that starts once more stays as it is, but for its share of the
    machine: there may be more nodes.

    Args:
        folders: of the nodes that are to start.
        url: of the cluster's bucket.
        spec: its ``nodes_max`` and ``slots`` decide each node's share of the machine.
        gpus: how many this machine has.
        beside: folders of the nodes that run, whose shares are taken.
    """
    for folder, part in zip(folders, _free_parts(gpus, spec, beside), strict=False):
        env = {**_worker_env(gpus, spec), **part}
        identity = NodeIdentity(node=folder.name, address=_address(_index(folder)), bucket=url, env=env)
        if (folder / FILE).exists():
            identity = msgspec.structs.replace(NodeIdentity.read(folder), env=env)
        write_atomic(folder / FILE, msgspec.json.encode(identity))


def _address(index: int) -> str:
    """One of 127.0.0.0/8 for each node; macOS has the first only, and tells its nodes apart by port."""
    if sys.platform != "linux":
        return "127.0.0.1"
    return f"127.0.{index // 250}.{index % 250 + 2}"


def _worker_env(gpus: int, spec: ClusterSpec) -> dict[str, str]:
    """Loopback for the collectives, and a fair part of the cores for each worker."""
    workers = spec.nodes_max * (spec.slots or max(1, gpus // spec.nodes_max))
    return {
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
        "NCCL_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // workers)),
    }


def _free_parts(gpus: int, spec: ClusterSpec, beside: list[Path]) -> list[dict[str, str]]:
    """The GPUs for each node that is to start, beside those that run.

    They are for all workers or for none: NCCL takes no two on one GPU, and ranks on GPUs and on CPUs have no backend in
    common.
    """
    if gpus == 0 or is_short_of_gpus(gpus, spec):
        return [{"CUDA_VISIBLE_DEVICES": ""} if gpus else {}] * spec.nodes_max
    share = gpus // spec.nodes_max
    parts = [",".join(map(str, range(at * share, (at + 1) * share))) for at in range(spec.nodes_max)]
    taken = {NodeIdentity.read(folder).env.get("CUDA_VISIBLE_DEVICES") for folder in beside}
    return [{"CUDA_VISIBLE_DEVICES": part} for part in parts if part not in taken]


def is_short_of_gpus(gpus: int, spec: ClusterSpec) -> bool:
    """Whether the machine has GPUs, but not one for each worker."""
    return gpus > 0 and gpus // spec.nodes_max < (spec.slots or 1)


def start_agent(folder: Path, bucket: Bucket) -> None:
    """Start a node's agent. What is left of an earlier one ends: two in one folder would depose each other."""
    if left := processes.kill_all(folder):
        raise GpuctlError(
            f"process {left[0].pid} of an earlier {folder.name} does not end", "run `gpuctl up` again once it has"
        )
    bucket.delete([layout.node(folder.name)])  # an earlier life's heartbeat
    processes.start(folder, "gpuctl.bootstrap.agent", [str(folder)], os.environ, "agent.log")


def give_notice(folders: list[Path], notice_s: float) -> list[psutil.Process]:
    """Give preemption notice as a cloud does; returns the agents that received it, none for 0 seconds."""
    agents = []
    for folder in folders if notice_s > 0 else ():
        if agent := processes.noted_process(folder):
            write_atomic(folder / "notice_s", str(notice_s).encode())
            agent.send_signal(signal.SIGTERM)
            agents.append(agent)
    return agents


def end_nodes(folders: list[Path], notice_s: float) -> list[psutil.Process]:
    """End these nodes for good, all at the same time; returns what lives on."""
    processes.wait_until_ended(give_notice(folders, notice_s), notice_s)
    for folder in folders:
        (folder / _TAKEN).touch()
    return [process for folder in folders for process in processes.kill_all(folder)]


def wait_until_live(folders: list[Path], bucket: Bucket) -> None:
    """Raises ``GpuctlError`` with the agent's last words if one ends instead."""
    deadline = time.monotonic() + _READY_S
    waiting = list(folders)
    while waiting:
        for folder in list(waiting):
            if (data := bucket.get(layout.node(folder.name))) and decode(data, NodeRecord, folder.name).beat > 0:
                waiting.remove(folder)
            elif not is_up(folder):
                said = (folder / "agent.log").read_text(errors="replace").strip().splitlines()
                why = said[-1] if said else full_disk(folder) or "no output"
                raise GpuctlError(f"{folder.name} did not start: {why}", f"see {folder / 'agent.log'}")
        if time.monotonic() > deadline:
            names = ", ".join(folder.name for folder in waiting)
            raise GpuctlError(f"{names} did not become live in {_READY_S:g} s", f"see {waiting[0] / 'agent.log'}")
        if waiting:
            time.sleep(0.02)


@contextlib.contextmanager
def locked(name: str) -> Iterator[None]:
    """One change of a cluster at a time; waits for another one to end."""
    make_state_dir()
    root = root_of(name)
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (root / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
