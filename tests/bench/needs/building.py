"""The first build of an environment, from an empty cache, beside ``uv sync`` of the same lock."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

from uv import find_uv_bin

from gpuctl.bootstrap.environments.node_environments import NodeEnvironments
from gpuctl.cluster.clock import SystemClock
from gpuctl.cluster.environments import registry
from gpuctl.cluster.records.environments import EnvironmentBuild, EnvironmentSource
from gpuctl.cluster.records.jobs import JobSpec
from gpuctl.cluster.storage.bucket import open_bucket
from tests.bench.needs.project import lock, place, variables
from tests.bench.settings import Settings
from tests.bench.steplog import spread
from tests.bench.table import Row, compared
from tests.waiting import until

_MOST = 1.15


def build(settings: Settings) -> list[Row]:
    root, where = place(settings.root / "build")
    try:
        code = root / "code"
        source = lock(code)
        ours, published, reference, about = [], [], [], ""
        for run in range(settings.runs + 1):  # the first warms the index's cache up
            ready, done, about = _ours(code, source, root / "ours")
            alone = _sync(code, root / "alone")
            if run:
                ours.append(ready)
                published.append(done)
                reference.append(alone)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    note = f"{spread(ours)} beside {spread(reference)}; {about}, {where}; uv's cache empty each time"
    later = f"from the lock to the bucket: packed and uploaded behind the job's back; {spread(published)}"
    return [
        compared("build", ours, reference, "s", most=_MOST, note=note),
        Row("build_published", median(published), None, "s", "", None, later),
    ]


def _ours(code: Path, source: EnvironmentSource, folder: Path) -> tuple[float, float, str]:
    """Seconds until it is ready, and until it is in the bucket; and what it is."""
    store = open_bucket((folder / "bucket").as_uri())
    own = EnvironmentBuild(node="node-0", incarnation="1", beat=0)
    env = variables()
    node = NodeEnvironments(folder / "node", store, own, "", env, SystemClock(), lambda _: None, lambda: None)
    job = JobSpec(job="needs-1", number=1, script="train.py", environment=source)
    os.sync()
    began = time.monotonic()
    found = node.have(job, code)
    ready = time.monotonic() - began
    (stored,) = until(lambda: registry.listed(store), "the environment is in the bucket")
    done = time.monotonic() - began
    node.stop()
    assert found is not None
    shutil.rmtree(folder)
    environment = stored.environment
    size = f"{environment.bytes / 1e6:.0f} MB in {environment.files} files"
    return ready, done, f"{len(environment.packages)} packages, {size}"


def _sync(code: Path, folder: Path) -> float:
    """Seconds of ``uv sync`` alone."""
    folder.mkdir()
    for name in ("pyproject.toml", "uv.lock"):
        shutil.copy(code / name, folder)
    command = [find_uv_bin(), "sync", "-q", "--frozen", "--no-dev", "--no-install-project", "--python", sys.executable]
    os.sync()
    began = time.monotonic()
    subprocess.run(command, cwd=folder, env=variables(UV_CACHE_DIR=str(folder / "cache")), check=True)
    took = time.monotonic() - began
    shutil.rmtree(folder)
    return took
