"""Pods that are killed, cut off, joined and replaced: how soon the others make their next step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

from tests.bench.network import Network
from tests.bench.rendezvous.pods import Agents, C10d, NoStep, Pods, Torchruns, pods
from tests.bench.steplog import spread
from tests.bench.table import Row

Measure = Callable[[Pods], float]
BAR_S = 3.0
PLUGIN_BAR_S = 5.0
SILENT_BAR_S = 6.0
"""Of a cluster, as in ``tests.bench.silence``: its nodes have more patience with each other."""
_STEADY = 20
_C10D_S = 90.0
"""So long c10d is watched: it dies after 60 to 70 s of some of these."""


def mingle(net: Network, url: str, root: Path, runs: int) -> list[Row]:
    """Runs of 2 to 4 pods, which begin as three."""
    return [_row(f"mingle_{kind}", measure, net, url, root, runs, Pods, BAR_S) for kind, measure in _KINDS.items()]


def plugin(net: Network, url: str, root: Path, runs: int) -> list[Row]:
    """The same under torchrun, with gpuctl's backend and, once each, with its own."""
    rows = []
    for kind, measure in _KINDS.items():
        row = _row(f"plugin_{kind}", measure, net, url, root, runs, Torchruns, PLUGIN_BAR_S)
        rows.append(replace(row, reference=_once(f"c10d-{kind}", measure, net, url, root)))
    return rows


def train(net: Network, url: str, root: Path, runs: int) -> list[Row]:
    """The same of the nodes of a cluster, under ``gpuctl train``."""
    rows = []
    for kind, measure in _KINDS.items():
        bar = None if kind in ("join", "replace") else SILENT_BAR_S if kind.startswith("silent") else BAR_S
        rows.append(_row(f"train_{kind}", measure, net, url, root, runs, Agents, bar))
    return rows


def _row(
    name: str,
    measure: Measure,
    net: Network,
    url: str,
    root: Path,
    runs: int,
    kind: type[Pods],
    bar_s: float | None,
) -> Row:
    seconds = []
    bar = "" if bar_s is None else f"<= {bar_s:g} s"
    for number in range(runs):
        machines = [net.add() for _ in range(3)]
        with pods(net, url, root, f"{name.replace('_', '-')}-{number}", "2:4", kind) as run:
            for machine in machines:
                run.start(machine)
            run.log.wait_for_steady(3, steps=_STEADY)
            seconds.append(measure(run))
            fatal = [machine for machine in run.machines() if run.exit_code(machine) is not None]
            if fatal:
                return Row(name, f"failed: a pod ended\n{run.said(fatal[0])[-500:]}", None, "s", bar, False)
    note = f"{spread(seconds)} in {runs} runs, none fatal"
    return Row(name, median(seconds), None, "s", bar, None if bar_s is None else max(seconds) <= bar_s, note)


def _once(name: str, measure: Measure, net: Network, url: str, root: Path) -> float | str:
    machines = [net.add() for _ in range(3)]
    with pods(net, url, root, name, "2:4", C10d) as run:
        run.patience_s = _C10D_S
        for machine in machines:
            run.start(machine)
        run.log.wait_for_steady(3, steps=_STEADY)
        try:
            return measure(run)
        except NoStep as error:
            return str(error)


def _kill(run: Pods, machine: int) -> float:
    old = run.log.pids()
    return -(run.kill(machine) - run.first_step_after(old))


def _cut(run: Pods, machine: int) -> float:
    """Its cable is pulled: nothing is reset, and it reaches neither the bucket nor the others. It is put back for the
    next one, but the pod is killed first: what it does when it is back is no part of this."""
    old = run.log.pids()
    at = time.monotonic()
    run.net.cut(machine)
    try:
        return run.first_step_after(old) - at
    finally:
        run.kill(machine)
        run.net.mend(machine)


def _join(run: Pods) -> float:
    """From the start of the pod's process, which imports, to the first step of all four."""
    machine = run.net.add()
    old = run.log.pids()
    at = time.monotonic()
    run.start(machine)
    return run.first_step_after(old) - at


def _replace(run: Pods) -> float:
    """One is killed, the others go on; then another comes, under another address."""
    old = run.log.pids()
    run.kill(run.another())
    run.first_step_after(old)
    run.log.wait_for_steady(2, steps=_STEADY)
    return _join(run)


_KINDS: dict[str, Measure] = {
    "kill_rank0": lambda run: _kill(run, run.rank0()),
    "kill_another": lambda run: _kill(run, run.another()),
    "silent_rank0": lambda run: _cut(run, run.rank0()),
    "silent_another": lambda run: _cut(run, run.another()),
    "join": _join,
    "replace": _replace,
}
