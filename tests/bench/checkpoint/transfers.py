"""Saves and restores in seconds, and what a save costs the thread that trains."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from tests.bench.checkpoint.contenders import (
    BOTO,
    CLONE,
    COPY,
    DCP,
    DCP_ASYNC,
    OURS,
    RAW,
    RAW_LARGE,
    RAW_MULTIPART,
)
from tests.bench.checkpoint.field import Field, size_of
from tests.bench.checkpoint.race import in_turn
from tests.bench.settings import Settings
from tests.bench.steplog import spread
from tests.bench.table import Row, compared

SAVE_BARS = {RAW: 1.10, DCP: 0.45, BOTO: 0.65}
RESTORE_BAR = 1.15
BLOCKED_BAR = 1.2


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds, by contender."""

    saves: dict[str, list[float]]
    reads: dict[str, list[float]]
    verified: dict[str, float]
    """Of the one restore at the end whose every bit was compared."""


class Transfers:
    """Both groups of rows come from the same runs."""

    def __init__(self, field: Field) -> None:
        self._field = field
        self._times = cache(self._measured)

    def saves(self, settings: Settings) -> list[Row]:
        times = self._times(settings)
        ours = times.saves[OURS]
        rows = [
            compared(f"save / {name}", ours, times.saves[name], "s", most, _note(ours, times.saves[name]))
            for name, most in SAVE_BARS.items()
        ]
        with self._field.entrants([RAW_LARGE, RAW_MULTIPART], settings) as entrants:
            found = in_turn(entrants, settings.runs, lambda one: float(one.ask("save", False)[1]))
        return [*rows, *(compared(f"save / {name}", ours, s, "s", note=_note(ours, s)) for name, s in found.items())]

    def restores(self, settings: Settings) -> list[Row]:
        times = self._times(settings)
        ours, raw = times.reads[OURS], times.reads[RAW]
        others = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in times.verified.items())
        note = f"{_note(ours, raw)}; each one's last restore, found to be what was saved: {others}"
        rows = [compared(f"restore / {RAW}", ours, raw, "s", RESTORE_BAR, note)]
        return [*rows, *(compared(f"restore / {name}", ours, times.reads[name], "s") for name in (DCP, BOTO))]

    def _measured(self, settings: Settings) -> Times:
        with self._field.entrants([OURS, RAW, DCP, BOTO], settings) as entrants:
            saves = in_turn(entrants, settings.runs, lambda one: float(one.ask("save", False)[1]))
            for one in entrants.values():
                one.ask("save", True)
            reads = in_turn(entrants, settings.runs, lambda one: float(one.ask("read")))
            verified = {name: float(one.ask("verify")) for name, one in entrants.items()}
        return Times(saves, reads, verified)


def blocked(field: Field, settings: Settings) -> list[Row]:
    with field.entrants([OURS, COPY, CLONE, DCP_ASYNC], settings) as entrants:
        saves = in_turn(entrants, settings.runs, lambda one: float(one.ask("save", False)[0]))
    ours = saves.pop(OURS)
    bars: dict[str, float | None] = {COPY: BLOCKED_BAR}
    gib = size_of(settings) / (1 << 30)
    note = f"{gib:g} GiB; buffers on both sides were touched before"
    return [
        compared(f"blocked / {name}", ours, s, "s", bars.get(name), f"{_note(ours, s)}; {note}")
        for name, s in saves.items()
    ]


def _note(ours: list[float], reference: list[float]) -> str:
    if len(ours) == 1:
        return "one run"
    return f"{spread(ours)} beside {spread(reference)} in {len(ours)} runs"
