"""Four nodes share one state in shards, and one of them is lost: how soon do the other three have all of it?"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec

from gpuctl.bootstrap.tier_server import TierServer
from gpuctl.cluster import tiers
from gpuctl.cluster.records import Member, Round
from gpuctl.cluster.worker import TIERS, WorkerContext
from tests.bench.checkpoint import memory_guard
from tests.bench.checkpoint.contenders import OURS
from tests.bench.checkpoint.entrant import environment
from tests.bench.checkpoint.field import Field, size_of
from tests.bench.settings import Settings
from tests.bench.steplog import spread
from tests.bench.table import Row, compared

NODES = ("a", "b", "c", "d")
BAR = 1 / 5
_SCRIPT = Path(__file__).with_name("survivor.py")
_JOB = "bench"
_PATIENCE_S = 180.0


def survivors(field: Field, settings: Settings) -> list[Row]:
    """Restores by three ranks of what four have saved: from the disks of their nodes and their neighbours, and from the
    bucket."""
    size = size_of(settings)
    memory_guard.check_memory(len(NODES) * (2 * size + (400 << 20)) + 3 * size)
    place = field.server.place("survivors")
    with ExitStack() as stack:
        ports = {}
        for name in NODES:
            server = TierServer(settings.root / name / "jobs", "secret")
            ports[name] = server.start("127.0.0.1")
            stack.callback(server.stop)
        _run(settings, _begun(settings, place.url, ports, 1, NODES), size, 0)
        times = json.loads(_run(settings, _begun(settings, place.url, ports, 2, NODES[:-1]), size, settings.runs))
    place.clear()
    near, bucket = times["near"], times["bucket"]
    note = f"{spread(near)} beside {spread(bucket)} in {len(near)} runs; 4 ranks' shards, read by 3" if near else ""
    return [compared("survivors / bucket", near, bucket, "s", BAR, note)]


def _begun(settings: Settings, url: str, ports: dict[str, int], number: int, names: Sequence[str]) -> Path:
    """A round of the nodes ``names``; the file that tells its ranks."""
    members = tuple(
        Member(node=name, incarnation="i", address="127.0.0.1", nproc=1, tier_port=ports[name]) for name in names
    )
    round_ = Round(job=_JOB, number=number, phase="run", epoch=1, members=members)
    told = []
    for rank, name in enumerate(names):
        envs = {}
        for tier in ("near", "bucket"):
            folder = settings.root / name / f"round-{number}-{tier}"
            folder.mkdir(parents=True)
            envs[tier] = WorkerContext("bench", url, _JOB, number, name, folder, folder, folder).env()
            if tier == "near":
                places = tiers.map_of(round_, rank, settings.root / name / "jobs" / _JOB / "tier", "secret")
                (folder / TIERS).write_bytes(msgspec.json.encode(places))
        told.append(envs)
    path = settings.root / f"round-{number}.json"
    path.write_text(json.dumps(told))
    return path


def _run(settings: Settings, told: Path, size: int, runs: int) -> str:
    """What rank 0 has written down; nothing if it has not."""
    world = len(json.loads(told.read_text()))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    subprocess.run(
        [*command, str(_SCRIPT), str(told), str(size), str(runs)],
        check=True,
        timeout=_PATIENCE_S,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        env=environment(OURS, settings.root),
    )
    times = Path(f"{told}.times")
    return times.read_text() if times.exists() else ""
