"""The table of losses as a picture: how long the others wait for their next step, by loss and by who runs them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")  # before pyplot looks for a screen

import matplotlib.pyplot as plt

_KINDS = {
    "kill_rank0": "rank 0 killed",
    "kill_another": "another killed",
    "silent_rank0": "rank 0 silent",
    "silent_another": "another silent",
    "join": "one joins",
    "replace": "a replacement",
}
_WAYS = {
    "mingle": ("gpuctl mingle", "tab:green"),
    "train": ("gpuctl train", "tab:blue"),
    "plugin": ("torchrun, gpuctl's backend", "tab:orange"),
    "c10d": ("torchrun, c10d", "0.6"),
}
_ENDED_S = 90.0
"""As long as c10d is watched; drawn for what never went on."""


def draw(table: Path, picture: Path) -> None:
    """Draw what ``table`` has, if that is anything. ``table``: as ``tests.bench.session`` writes it."""
    rows = {row["name"]: row for row in json.loads(table.read_text())}
    there = [way for way in _WAYS if any(_seconds(rows, way, kind) is not None for kind in _KINDS)]
    if not there:
        return
    figure, axes = plt.subplots(figsize=(10, 4.2))
    width = 0.8 / len(there)
    for number, way in enumerate(there):
        for place, kind in enumerate(_KINDS):
            found = _seconds(rows, way, kind)
            if found is None:
                continue
            at = place + (number - (len(there) - 1) / 2) * width
            went_on = isinstance(found, float)
            height = found if isinstance(found, float) else _ENDED_S
            label = _WAYS[way][0] if place == 0 else None
            axes.bar(at, height, width * 0.9, color=_WAYS[way][1], hatch=None if went_on else "///", label=label)
            axes.annotate(
                f"{found:.1f}" if isinstance(found, float) else "\u2715", (at, height), ha="center", va="bottom"
            )
    axes.set_yscale("log")
    axes.set_ylim(0.05, 200)
    axes.set_ylabel("seconds to the next step")
    axes.set_xticks(range(len(_KINDS)), [*_KINDS.values()])
    axes.set_title("\u2715: the job had ended, or made no step in 90 s", fontsize=9, loc="right")
    axes.legend(ncols=len(there), loc="upper center", bbox_to_anchor=(0.5, -0.1), frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(picture, dpi=120, bbox_inches="tight")
    plt.close(figure)


def _seconds(rows: dict[str, Any], way: str, kind: str) -> float | str | None:
    """A number, or what has become of it; ``None`` if it was not measured."""
    row = rows.get(f"{'plugin' if way == 'c10d' else way}_{kind}")
    found = row and row["reference" if way == "c10d" else "ours"]
    return float(found) if isinstance(found, int | float) else found
