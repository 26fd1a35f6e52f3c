"""Four nodes share one state in shards, and one of them is lost: how soon do the other three have all of it?

Each node has a network namespace of its own. Its link to the bucket carries 1 Gb/s each way, as a rented machine's does
or less; to the other nodes it is as fast as this machine. On loopback the bucket would be as fast as a disk.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[3])

from gpuctl.cluster.checkpoints import replica_layout
from gpuctl.cluster.records.rounds import Member, Round
from gpuctl.cluster.worker_context import TIERS, WorkerContext
from gpuctl.stacks.providers import processes
from tests.bench.checkpoint import memory_guard
from tests.bench.checkpoint.contenders import OURS
from tests.bench.checkpoint.entrant import environment
from tests.bench.checkpoint.field import size_of
from tests.bench.checkpoint.storage import serving
from tests.bench.network import SWITCH, Network, can_slow_switch, network
from tests.bench.settings import Settings
from tests.bench.steplog import spread
from tests.bench.table import Row, compared
from tests.fakes.stores.serving import started

NODES = ("a", "b", "c", "d")
BAR = 1 / 5
_LINK_MBIT_PER_S = 1000
_SURVIVOR = Path(__file__).with_name("survivor.py")
_TIER_NODE = Path(__file__).with_name("tier_node.py")
_TOKEN = "secret"
_JOB = "bench"
_PATIENCE_S = 300.0


def survivors(settings: Settings) -> list[Row]:
    """Restores by three ranks of what four have saved: from the disks of their nodes and their neighbours, and from the
    bucket."""
    name = "survivors / bucket"
    if not can_slow_switch():
        return [Row(f"{name} (no root to slow a network)", "not measured", None, "s", f"<= {BAR:g} x", None)]
    size = size_of(settings)
    memory_guard.check_memory(len(NODES) * (2 * size + (400 << 20)) + 3 * size)
    command = ["unshare", "--net", sys.executable, __file__, str(settings.root), str(size), str(settings.runs)]
    env = {**os.environ, processes.MARK: str(settings.root / "survivors")}
    subprocess.run(command, check=True, stdout=sys.stderr, env=env)
    times = json.loads(_answer(settings.root).read_text())
    near, bucket = times["near"], times["bucket"]
    note = f"{spread(near)} beside {spread(bucket)} in {len(near)} runs; 4 ranks' shards, read by 3"
    return [compared(name, near, bucket, "s", BAR, note)]


def main(folder: str, size: str, runs: str) -> None:
    """At the switch, where the bucket is."""
    root = Path(folder)
    with network() as net, serving(SWITCH) as server, ExitStack() as stack:
        ports = {}
        for name in NODES:
            number = net.add()
            net.slow_switch(number, _LINK_MBIT_PER_S)
            serve = [sys.executable, str(_TIER_NODE), str(root / name / "jobs"), _TOKEN, net.address(number)]
            ports[name] = int(stack.enter_context(started([*net.inside(number), *serve], r"^(\d+)$")))
        url = server.place("survivors").url
        _run(net, root, _begun(net, root, url, ports, 1, NODES), size, "0")
        times = _run(net, root, _begun(net, root, url, ports, 2, NODES[:-1]), size, runs)
    _answer(root).write_text(times)


def _answer(root: Path) -> Path:
    return root / "survivors.json"


def _begun(net: Network, root: Path, url: str, ports: dict[str, int], number: int, names: Sequence[str]) -> Path:
    """A round of the nodes ``names``; the file that tells its ranks."""
    members = tuple(
        Member(node=name, incarnation="i", address=net.address(rank), nproc=1, tier_port=ports[name])
        for rank, name in enumerate(names)
    )
    round_ = Round(job=_JOB, number=number, phase="run", epoch=1, members=members)
    told = []
    for rank, name in enumerate(names):
        envs = {}
        for tier in ("near", "bucket"):
            folder = root / name / f"round-{number}-{tier}"
            folder.mkdir(parents=True)
            envs[tier] = WorkerContext("bench", url, _JOB, number, name, folder, folder, folder).env()
            if tier == "near":
                places = replica_layout.map_of(round_, rank, root / name / "jobs" / _JOB / "tier", _TOKEN)
                (folder / TIERS).write_bytes(msgspec.json.encode(places))
        told.append(envs)
    path = root / f"round-{number}.json"
    path.write_text(json.dumps(told))
    return path


def _run(net: Network, root: Path, told: Path, size: str, runs: str) -> str:
    """What rank 0 has written down; nothing if it has not. Raises ``RuntimeError`` if a rank fails."""
    world = len(json.loads(told.read_text()))
    env = {**environment(OURS, root), "GLOO_SOCKET_IFNAME": "eth0", "WORLD_SIZE": str(world)}
    env |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": net.address(0), "MASTER_PORT": "29500"}
    ranks = [
        subprocess.Popen(
            [*net.inside(rank), sys.executable, str(_SURVIVOR), str(told), size, runs],
            stdin=subprocess.DEVNULL,
            env={**env, "RANK": str(rank)},
        )
        for rank in range(world)
    ]
    try:
        codes = [rank.wait(_PATIENCE_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    if any(codes):
        raise RuntimeError(f"the ranks ended with {codes}")
    times = Path(f"{told}.times")
    return times.read_text() if times.exists() else ""


if __name__ == "__main__":
    main(*sys.argv[1:])
