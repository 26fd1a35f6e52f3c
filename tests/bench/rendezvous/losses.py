"""Pods that are killed, cut off, joined and replaced: how soon the others make their next step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import median

from tests.bench.network import Network
from tests.bench.rendezvous.pods import Pods, pods
from tests.bench.steplog import spread
from tests.bench.table import Row

BAR_S = 3.0
_STEADY = 20


def rows(net: Network, url: str, root: Path, runs: int) -> list[Row]:
    """Runs of 2 to 4 pods, which begin as three."""
    kinds: dict[str, Callable[[Pods], float]] = {
        "mingle_kill_rank0": lambda run: _kill(run, run.rank0()),
        "mingle_kill_another": lambda run: _kill(run, run.another()),
        "mingle_silent_rank0": lambda run: _cut(run, run.rank0()),
        "mingle_silent_another": lambda run: _cut(run, run.another()),
        "mingle_join": _join,
        "mingle_replace": _replace,
    }
    return [_row(name, kind, net, url, root, runs) for name, kind in kinds.items()]


def _row(name: str, kind: Callable[[Pods], float], net: Network, url: str, root: Path, runs: int) -> Row:
    seconds = []
    for number in range(runs):
        machines = [net.add() for _ in range(3)]
        with pods(net, url, root, f"{name.replace('_', '-')}-{number}", "2:4") as run:
            for machine in machines:
                run.start(machine)
            run.log.wait_for_steady(3, steps=_STEADY)
            seconds.append(kind(run))
            fatal = [machine for machine in run.machines() if run.exit_code(machine) is not None]
            if fatal:
                said = run.said(fatal[0])[-500:]
                return Row(name, f"failed: a pod ended\n{said}", None, "s", f"<= {BAR_S:g} s", False)
    note = f"{spread(seconds)} in {runs} runs, none fatal"
    return Row(name, median(seconds), None, "s", f"<= {BAR_S:g} s", max(seconds) <= BAR_S, note)


def _kill(run: Pods, machine: int) -> float:
    old = run.log.pids()
    return -(run.kill(machine) - run.first_step_after(old))


def _cut(run: Pods, machine: int) -> float:
    """Its cable is pulled: nothing is reset, and it reaches neither the bucket nor the others. It is put back for the
    next one, but the pod is killed first: what it does when it is back is no part of this."""
    import time

    old = run.log.pids()
    at = time.monotonic()
    run.net.cut(machine)
    first = run.first_step_after(old)
    run.kill(machine)
    run.net.mend(machine)
    return first - at


def _join(run: Pods) -> float:
    """From the start of the pod's process, which imports, to the first step of all four."""
    import time

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
