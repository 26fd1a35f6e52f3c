"""Rows: what was measured, against what, and whether that is good enough."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

_VERDICTS = {True: "met", False: "MISSED", None: ""}


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table, and an object of ``build/bench.json`` but for ``note``."""

    name: str
    ours: float | str
    reference: float | str | None
    """A number or what happened; ``None`` if there is nothing to compare with, or it was not run."""
    unit: str
    bar: str
    met: bool | None
    """``None`` for a row without a bar, which is there to compare with."""
    note: str = ""
    """Spread, number of runs, where the time went: for people."""
    paired: float | None = None
    """The ratio, where each measurement of ours has one of the reference beside it."""

    @property
    def ratio(self) -> float | None:
        """Ours divided by the reference."""
        if self.paired is not None:
            return round(self.paired, 4)
        if isinstance(self.ours, int | float) and isinstance(self.reference, int | float) and self.reference:
            return round(self.ours / self.reference, 4)
        return None


def failed(name: str, why: str) -> Row:
    return Row(name, f"failed: {why}", None, "", "", False)


def compared(
    name: str, ours: Sequence[float], reference: Sequence[float], unit: str, most: float | None = None, note: str = ""
) -> Row:
    """By medians. ``most`` is the bar: how many times the reference ours may be."""
    ratio = median(ours) / median(reference)
    bar, met = ("", None) if most is None else (f"<= {most:g} x", ratio <= most)
    return Row(name, median(ours), median(reference), unit, bar, met, note)


def joined(runs: Sequence[Sequence[Row]]) -> list[Row]:
    """The rows of several runs, each as it was in the run in the middle. A bar is met when it is met in every run."""
    return [replace(_middle(rows), met=_met(rows, len(runs))) for rows in _by_name(runs).values()]


def shown_runs(runs: Sequence[Sequence[Row]]) -> str:
    """The ratio of each row in each run; where there is none, ours."""
    lines = [("name", *(f"run {number + 1}" for number in range(len(runs))), "bar", "")]
    for name, rows in _by_name(runs).items():
        figures = [_text(_figure(row)) for row in rows]
        figures += ["-"] * (len(runs) - len(rows))
        lines.append((name, *figures, rows[0].bar, _VERDICTS[_met(rows, len(runs))]))
    return _aligned(lines)


def _by_name(runs: Sequence[Sequence[Row]]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for rows in runs:
        for row in rows:
            found.setdefault(row.name, []).append(row)
    return found


def _met(rows: Sequence[Row], runs: int) -> bool | None:
    """A run that lacks the row has not met its bar."""
    if any(row.met is None for row in rows):
        return None
    return len(rows) == runs and all(row.met for row in rows)


def _middle(rows: Sequence[Row]) -> Row:
    numbers = [row for row in rows if not isinstance(_figure(row), str)]
    return sorted(numbers, key=_figure)[len(numbers) // 2] if numbers else rows[-1]


def _figure(row: Row) -> Any:
    return row.ours if row.ratio is None else row.ratio


def write(rows: Sequence[Row], path: Path) -> None:
    """Rows of an earlier run that were not measured again stay."""
    kept = {row["name"]: row for row in json.loads(path.read_text())} if path.exists() else {}
    for row in rows:
        content = {**asdict(row), "ratio": row.ratio}
        kept[row.name] = {key: content[key] for key in ("name", "ours", "reference", "unit", "ratio", "bar", "met")}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(list(kept.values()), indent=1) + "\n")
    partial.replace(path)


def shown(rows: Sequence[Row]) -> str:
    lines = [("name", "ours", "reference", "unit", "ratio", "bar", "")]
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.3g}"
        lines.append((row.name, _text(row.ours), _text(row.reference), row.unit, ratio, row.bar, _VERDICTS[row.met]))
    return _aligned(lines)


def _aligned(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def _text(value: float | str | None) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else f"{value:.3g}"
