"""The ``local`` provider: nodes that are processes on this machine, each with its own directory and loopback address.

A real backend with the real agent: what runs here runs the same way on rented machines. Nodes share the machine's
cores, so each worker gets its part of them.

::

    <state>/local/<cluster>/nodes/<node>/   identity.json, process.json, agent.log, jobs/…
    <state>/buckets/<cluster>/              the bucket, unless --bucket names another; stays after ``down``

All of it is for this user alone: a job's environment is in the bucket, and with it whatever token it was given.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path

import msgspec

from gpuctl.bootstrap.devices import found_devices
from gpuctl.bootstrap.identity import Identity
from gpuctl.cluster import layout
from gpuctl.cluster.bucket import Bucket, open_bucket, probe
from gpuctl.cluster.errors import BadInput, GpuctlError
from gpuctl.cluster.records import ClusterSpec, NodeRecord, decode
from gpuctl.stacks import processes
from gpuctl.stacks.known import KnownCluster, forget, make_state_dir, remember, state_dir
from gpuctl.stacks.provider import Say, UpRequest, agree_on_spec, forget_nodes

HEARTBEAT_S = 0.5
LEASE_S = 3.0
_READY_S = 60.0
_TAKEN = "taken"
"""A file in the folder of a node that was preempted: it does not come back."""


class LocalProvider:
    """See ``provider.Provider``."""

    def up(self, request: UpRequest, say: Say) -> KnownCluster:
        url = request.bucket or f"file://{state_dir() / 'buckets' / request.name}"
        cluster = KnownCluster(name=request.name, provider="local", bucket=url, created_at=time.time())
        with _locked(request.name):
            bucket = open_bucket(url)
            probe(bucket)
            spec = _agree_on_spec(bucket, request)
            remember(cluster)
            missing = spec.nodes_max - sum(1 for folder in _node_dirs(request.name) if _is_up(folder))
            folders = [folder for folder in _node_dirs(request.name) if _may_restart(folder)][:missing]
            while len(folders) < missing:
                folders.append(_new_node_dir(request.name, url, spec, reserved=folders))
            for folder in folders:
                _start_agent(folder, bucket)
            _wait_until_live(folders, bucket)
        running = spec.nodes_max - missing
        say(f"{_nodes(len(folders))} started" + (f", {running} already running" if running else ""))
        return cluster

    def down(self, cluster: KnownCluster, say: Say, *, force: bool = False) -> list[str]:  # noqa: ARG002
        with _locked(cluster.name):
            root = _root(cluster.name)
            count = sum(1 for folder in _node_dirs(cluster.name) if _is_up(folder))
            left = processes.kill_all(root)
            say(f"{_nodes(count)} ended")
            if left:
                return [f"process {p.pid} ({' '.join(p.cmdline())[:80]})" for p in left]
            forget_nodes(open_bucket(cluster.bucket))
            shutil.rmtree(root / "nodes", ignore_errors=True)
            forget(cluster.name)
            return []

    def preempt(
        self, cluster: KnownCluster, node: str, notice_s: float, replace_after_s: float | None, say: Say
    ) -> None:
        folder = _root(cluster.name) / "nodes" / node
        if not _is_up(folder):
            running = ", ".join(f.name for f in _node_dirs(cluster.name) if _is_up(f)) or "none"
            raise BadInput(f"there is no running node {node!r} in {cluster.name!r}", f"running nodes: {running}")
        # A process of its own does it, so that closing this terminal half-way does not save the node.
        events = _root(cluster.name) / "preemptions"
        events.mkdir(exist_ok=True)
        args = [cluster.name, node, str(notice_s), "never" if replace_after_s is None else str(replace_after_s)]
        doer = events / f"{node}-{time.time_ns()}"
        doer.mkdir()
        processes.start(doer, "gpuctl.stacks.local", args, os.environ, "log")
        _follow(doer, say)


def places(name: str) -> dict[str, tuple[Path, dict[str, str]]]:
    """The nodes that run: each one's folder and the environment that its workers get."""
    found = {}
    for folder in filter(_is_up, _node_dirs(name)):
        path = folder / "identity.json"
        env = decode(path.read_bytes(), Identity, str(path)).env
        tools = f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"
        found[folder.name] = (folder, {**env, "PATH": tools, processes.MARK: str(folder)})
    return found


def take_away(name: str, node: str, notice_s: float, replace_after_s: float | None, say: Say) -> None:
    """What a cloud does to a spot machine, and what its group does then."""
    folder = _root(name) / "nodes" / node
    agent = processes.noted_process(folder)
    if agent and notice_s > 0:
        (folder / "notice_s").write_text(str(notice_s))
        given = time.monotonic()
        agent.send_signal(signal.SIGTERM)
        say(f"{node}: notice given, {notice_s:g} s")
        if not processes.wait_until_ended([agent], notice_s):
            say(f"{node}: left by itself after {time.monotonic() - given:.1f} s")
    (folder / _TAKEN).touch()
    left = processes.kill_all(folder)
    say(f"{node}: taken" + (f", but {len(left)} processes live on" if left else ""))
    if replace_after_s is None:
        return
    time.sleep(replace_after_s)
    with _locked(name):
        bucket, spec = _cluster_of(folder)
        replacement = _new_node_dir(name, bucket.url, spec, reserved=[])
        _start_agent(replacement, bucket)
        _wait_until_live([replacement], bucket)
    say(f"{replacement.name}: started in its place")


# -- the spec ----------------------------------------------------------------------------------------------------------


def _agree_on_spec(bucket: Bucket, request: UpRequest) -> ClusterSpec:
    """The cluster's spec: the one that is there if it is the same, or a new one."""
    asked = ClusterSpec(
        name=request.name,
        provider="local",
        nodes_min=request.nodes_min,
        nodes_max=request.nodes_max,
        slots=request.slots,
        heartbeat_s=HEARTBEAT_S,
        lease_s=LEASE_S,
        stall_minutes=request.stall_minutes,
        token=secrets.token_hex(16),
        created_at=time.time(),
    )
    return agree_on_spec(bucket, asked, {"nodes": _size, "slots": attrgetter("slots"), "name": attrgetter("name")})


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"


def _size(spec: ClusterSpec) -> str:
    return str(spec.nodes_max) if spec.nodes_min == spec.nodes_max else f"{spec.nodes_min}:{spec.nodes_max}"


def _cluster_of(folder: Path) -> tuple[Bucket, ClusterSpec]:
    path = folder / "identity.json"
    identity = decode(path.read_bytes(), Identity, str(path))
    bucket = open_bucket(identity.bucket)
    return bucket, decode(bucket.get(layout.CLUSTER) or b"", ClusterSpec, layout.CLUSTER)


# -- nodes -------------------------------------------------------------------------------------------------------------


def _root(name: str) -> Path:
    return state_dir() / "local" / name


def _node_dirs(name: str) -> list[Path]:
    return sorted((_root(name) / "nodes").glob("node-*"), key=_index)


def _index(folder: Path) -> int:
    return int(folder.name.removeprefix("node-"))


def _is_up(folder: Path) -> bool:
    return processes.noted_process(folder) is not None


def _may_restart(folder: Path) -> bool:
    """It died by itself (a crash, a reboot of this machine) and was not taken away."""
    return not _is_up(folder) and not (folder / _TAKEN).exists()


def _new_node_dir(name: str, url: str, spec: ClusterSpec, reserved: list[Path]) -> Path:
    index = 1 + max((_index(folder) for folder in [*_node_dirs(name), *reserved]), default=-1)
    folder = _root(name) / "nodes" / f"node-{index}"
    folder.mkdir(parents=True, mode=0o700)
    identity = Identity(node=folder.name, address=_address(index), bucket=url, env=_worker_env(index, spec))
    (folder / "identity.json").write_bytes(msgspec.json.encode(identity))
    return folder


def _address(index: int) -> str:
    """One of 127.0.0.0/8 for each node; macOS has the first only, and tells its nodes apart by port."""
    if sys.platform != "linux":
        return "127.0.0.1"
    return f"127.0.{index // 250}.{index % 250 + 2}"


def _worker_env(index: int, spec: ClusterSpec) -> dict[str, str]:
    """Loopback for the collectives, and a fair part of the machine for each worker."""
    gpus = len(found_devices())
    workers = spec.nodes_max * (spec.slots or max(1, gpus // spec.nodes_max))
    env = {
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
        "NCCL_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // workers)),
    }
    if gpus:
        share = max(1, gpus // spec.nodes_max)
        first = index % spec.nodes_max * share
        env["CUDA_VISIBLE_DEVICES"] = ",".join(str(gpu) for gpu in range(first, min(first + share, gpus)))
    return env


def _start_agent(folder: Path, bucket: Bucket) -> None:
    bucket.delete([layout.node(folder.name)])  # an earlier life's heartbeat
    processes.start(folder, "gpuctl.bootstrap.agent", [str(folder)], os.environ, "agent.log")


def _wait_until_live(folders: list[Path], bucket: Bucket) -> None:
    """Raises ``GpuctlError`` with the agent's last words if one ends instead."""
    deadline = time.monotonic() + _READY_S
    waiting = list(folders)
    while waiting:
        for folder in list(waiting):
            if (data := bucket.get(layout.node(folder.name))) and decode(data, NodeRecord, folder.name).beat > 0:
                waiting.remove(folder)
            elif not _is_up(folder):
                lines = (folder / "agent.log").read_text(errors="replace").strip().splitlines() or ["no output"]
                raise GpuctlError(f"{folder.name} did not start: {lines[-1]}", f"see {folder / 'agent.log'}")
        if time.monotonic() > deadline:
            names = ", ".join(folder.name for folder in waiting)
            raise GpuctlError(f"{names} did not become live in {_READY_S:g} s", f"see {waiting[0] / 'agent.log'}")
        if waiting:
            time.sleep(0.02)


@contextlib.contextmanager
def _locked(name: str) -> Iterator[None]:
    """One change of a cluster at a time; waits for another one to end."""
    make_state_dir()
    root = _root(name)
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (root / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _follow(doer: Path, say: Say) -> None:
    """Pass on what a preemption in another process says, until it is over."""
    said = 0
    over = False
    while not over:
        over = not _is_up(doer)
        lines = (doer / "log").read_text(errors="replace").splitlines()
        for line in lines[said:]:
            say(line)
        said = len(lines)
        if not over:
            time.sleep(0.05)


def main(name: str, node: str, notice_s: str, replace_after_s: str) -> None:
    after = None if replace_after_s == "never" else float(replace_after_s)
    take_away(name, node, float(notice_s), after, lambda line: print(line, flush=True))


if __name__ == "__main__":
    main(*sys.argv[1:])
