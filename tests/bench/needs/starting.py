"""The start of a round in an environment beside one on the node itself: from the launch to the first all-reduce."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from statistics import median

from gpuctl.bootstrap.environments.disk import NodeEnvironment
from gpuctl.bootstrap.environments.facts import NodeFacts
from gpuctl.bootstrap.environments.install import build, lock
from gpuctl.bootstrap.environments.install.uv import Uv
from gpuctl.bootstrap.jobs.interpreters import Interpreters
from gpuctl.cluster.records.environments import Environment, PackedFiles
from gpuctl.stacks.providers import processes
from tests.bench import first_round
from tests.bench.needs import project
from tests.bench.settings import Settings
from tests.bench.steplog import spread
from tests.bench.table import Row
from tests.waiting import until

_MORE_S = 0.05
_TURNS = 3
"""As many launches of each kind as runs of a bench that take longer."""


def round_start(settings: Settings) -> list[Row]:
    root, where = project.place(settings.root / "start")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", processes.MARK: str(root)}
    interpreters = Interpreters(env, root, lambda: None)
    try:
        environment = _environment(root)
        for one in (None, environment):
            interpreters.of(one)
        until(lambda: interpreters.is_ready, "two warm interpreters")
        inside, outside = [], []
        for turn in range(_TURNS * settings.runs):
            outside.append(first_round._ours(interpreters.of(None), root / f"outside-{turn}", env))
            inside.append(
                first_round._ours(interpreters.of(environment), root / f"inside-{turn}", environment.variables(env))
            )
    finally:
        interpreters.stop()
        shutil.rmtree(root, ignore_errors=True)
    more = median(inside) - median(outside)
    note = f"{spread(inside)} beside {spread(outside)}; {where}"
    bar = f"<= {_MORE_S} s more"
    return [Row("round_start", median(inside), median(outside), "s", bar, more <= _MORE_S, f"{more:+.3f} s; {note}")]


def _environment(root: Path) -> NodeEnvironment:
    code, scratch, folder = root / "code", root / "scratch", root / "environment"
    source = project.lock(code)
    scratch.mkdir()
    uv = Uv(project.variables(), root / "cache")
    build.make_empty(folder, uv, what="bench")
    locked = lock.resolve(source, code, scratch, uv, NodeFacts.of_this_node())
    build.install(locked, folder, uv, what="bench")
    pack = PackedFiles(sha256="", bytes=0)
    return NodeEnvironment(folder, Environment(digest="e", file="uv.lock", packages={}, bytes=0, files=0, pack=pack))
