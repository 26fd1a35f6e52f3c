"""A node that replaces one that was lost: from its first heartbeat to its first step, with its environment or none."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from statistics import median
from typing import Literal

from gpuctl.cluster.environments import registry
from gpuctl.cluster.jobs import code_archive, queue
from gpuctl.cluster.jobs.code_survey import survey
from gpuctl.cluster.records.environments import EnvironmentSource
from tests.bench.needs import project
from tests.bench.ours import LocalCluster, local_cluster
from tests.bench.settings import Settings
from tests.bench.steplog import spread
from tests.bench.table import Row
from tests.fakes.stores import s3
from tests.waiting import until

_MOST_S = {"neighbour": 3.0, "bucket": 6.0}
_IMPORTS = ("pandas", "einops")
Way = Literal["neighbour", "bucket"]


def replacement(settings: Settings) -> list[Row]:
    root, where = project.place(settings.root / "replacement")
    code = root / "code"
    source = project.lock(code)
    shutil.copy(Path(__file__).with_name("counting.py"), code)
    rows = []
    try:
        with s3.serving() as endpoint:
            s3.create(endpoint, "needs")
            url = s3.url(endpoint, "needs")
            plain = _times(root, code, None, f"{url}", "neighbour", settings.runs)
            for way, most_s in _MOST_S.items():
                times = _times(root, code, source, url, way, settings.runs)  # type: ignore[arg-type]
                more = median(times) - median(plain)
                note = f"{more:+.2f} s; {spread(times)} beside {spread(plain)}; {where}, moto"
                bar = f"<= {most_s:g} s more"
                rows.append(Row(f"replacement_{way}", median(times), median(plain), "s", bar, more <= most_s, note))
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return rows


def _times(root: Path, code: Path, source: EnvironmentSource | None, bucket: str, way: Way, runs: int) -> list[float]:
    base, _, query = bucket.partition("?")
    url = f"{base}/{way}-{time.monotonic_ns()}?{query}"
    with local_cluster(root, (2, 2), url) as cluster:
        out = root / f"out-{time.monotonic_ns()}"
        out.mkdir()
        job = _submit(cluster, code, source, out)
        first = cluster.wait_for_world(job, 2, 300)
        until(lambda: _done_at(out, first.number), "a first step", 300)
        if source:
            until(lambda: any(one.environment.bytecode for one in registry.listed(cluster.bucket)), "bytecode", 300)
        return [_one(cluster, job, out, way) for _ in range(runs)]


def _one(cluster: LocalCluster, job: str, out: Path, way: Way) -> float:
    """Seconds from the replacement's first heartbeat to the first step with it."""
    before = cluster.wait_for_world(job, 2)
    known = set(cluster.records())
    if way == "bucket":
        for archive in cluster.nodes_dir.glob("*/environments/archives/*"):
            archive.unlink()
    lost = next(member.node for member in before.members if member.node != cluster.rank0())
    cluster.preempt(lost, 0.0, 0.0)
    new = until(lambda: set(cluster.records()) - known, "a replacement", 60).pop()
    began = cluster.records()[new].started_at
    number = until(lambda: _later_round(cluster, job, before.number), "the next round", 120)
    return until(lambda: _done_at(out, number), "its first step", 120) - began


def _later_round(cluster: LocalCluster, job: str, number: int) -> int:
    """The number of a round of both nodes after round ``number``; 0 while there is none."""
    now = cluster.wait_for_world(job, 2, 120)
    return now.number if now.number > number else 0


def _done_at(out: Path, number: int) -> float | None:
    """When the last of both ranks had made the first step of a round."""
    found = [float(text) for path in out.glob(f"{number}-2-*") if (text := path.read_text())]
    return max(found) if len(found) == 2 else None


def _submit(cluster: LocalCluster, code: Path, source: EnvironmentSource | None, out: Path) -> str:
    with code_archive.packed(survey(code)) as packed:
        code_archive.upload(cluster.bucket, packed)
        args = (str(out), *(_IMPORTS if source else ()))
        request = queue.JobRequest(script="counting.py", code=packed.digest, args=args, environment=source)
        return queue.submit(cluster.bucket, queue.cluster_spec(cluster.bucket), request).job
