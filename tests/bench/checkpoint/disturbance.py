"""What training feels of a save that is in flight: the tail of its steps' times, and the interpreter's lock."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median, quantiles

from tests.bench.checkpoint.contenders import DCP_ASYNC, OURS
from tests.bench.checkpoint.entrant import Entrant
from tests.bench.checkpoint.field import Field
from tests.bench.checkpoint.steps import OTHER_CORE
from tests.bench.settings import Settings
from tests.bench.table import Row, compared

STEP_BAR = 1.25
GIL_BAR_MS = 20.0
_STEPS = 600
_LEAST_STEPS = 300
_IDLE_S = 3.0


def step_p99(field: Field, settings: Settings) -> list[Row]:
    each = -(-_STEPS // settings.runs)
    calm, ours = _steps(field, settings, OURS, settings.runs, each)
    calm_there, theirs = _steps(field, settings, DCP_ASYNC, 1, _LEAST_STEPS)
    note = f"p99/median in ms: {_tail(ours)} of {len(ours)} steps beside {_tail(calm)} of {len(calm)} without a save"
    there = f"p99/median in ms: {_tail(theirs)} of {len(theirs)} steps beside {_tail(calm_there)} without a save"
    return [
        compared("step_p99 / without a save", [_p99(ours)], [_p99(calm)], "ms", STEP_BAR, note),
        compared(f"step_p99 / {DCP_ASYNC}", [_p99(ours)], [_p99(theirs)], "ms", note=there),
    ]


def gil_stall(field: Field, settings: Settings) -> list[Row]:
    idle, ours = _gaps(field, settings, OURS, settings.runs)
    idle_there, theirs = _gaps(field, settings, DCP_ASYNC, min(2, settings.runs))
    stall, there = (max(0.0, max(gaps) - max(calm)) for gaps, calm in ((ours, idle), (theirs, idle_there)))
    note = f"longest gap of each save {_shown(ours)} ms, idle {_shown(idle)} ms; {DCP_ASYNC} {_shown(theirs)} ms"
    return [Row("gil_stall", stall, there, "ms", f"<= {GIL_BAR_MS:g} ms", stall <= GIL_BAR_MS, note)]


def _steps(field: Field, settings: Settings, name: str, runs: int, each: int) -> tuple[list[float], list[float]]:
    """Milliseconds of steps without a save and with one in flight, in turns."""
    calm: list[float] = []
    disturbed: list[float] = []
    with field.entrants([name], settings) as entrants, field.server.on_core(OTHER_CORE):
        one = _warmed_up(entrants[name])
        for _ in range(runs):
            calm += one.ask("undisturbed", each)
            disturbed += one.ask("disturbed", each)
    return [1000 * s for s in calm], [1000 * s for s in disturbed]


def _gaps(field: Field, settings: Settings, name: str, runs: int) -> tuple[list[float], list[float]]:
    """Longest gap in milliseconds of each idle time and of each save, in turns."""
    idle: list[float] = []
    saves: list[float] = []
    with field.entrants([name], settings) as entrants, field.server.on_core(OTHER_CORE):
        one = _warmed_up(entrants[name])
        for _ in range(runs):
            idle.append(1000 * max(one.ask("idle_gaps", _IDLE_S)))
            saves.append(1000 * max(one.ask("save_gaps")))
    return idle, saves


def _warmed_up(one: Entrant) -> Entrant:
    one.ask("save", False)
    return one


def _p99(samples: Sequence[float]) -> float:
    return quantiles(samples, n=100)[98]


def _tail(samples: Sequence[float]) -> str:
    return f"{_p99(samples):.1f}/{median(samples):.1f}"


def _shown(samples: Sequence[float]) -> str:
    return " ".join(f"{sample:.1f}" for sample in samples)
