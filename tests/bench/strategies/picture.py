"""Pictures: what compression costs in steps, and what all ways bring in seconds and bytes."""

from __future__ import annotations

import json
from math import inf
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")  # before pyplot looks for a screen

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from tests.bench.strategies import apart

_WAYS = {
    "exact": ("exact", "0.4"),
    "powersgd:rank=4": ("PowerSGD, rank 4", "tab:orange"),
    "topk:ratio=0.01": ("top-k, 1 %", "tab:blue"),
}
_ON_LINK = {
    "exact": ("exact", "exact", "0.4"),
    "powersgd:rank=4": ("PowerSGD, rank 4", "powersgd", "tab:orange"),
    "topk:ratio=0.01": ("top-k, 1 %", "topk", "tab:blue"),
    apart.diloco(apart.EVERY): (f"DiLoCo, H = {apart.EVERY}", "diloco", "tab:green"),
}
"""Strategies with their names in the picture and in rows."""
_SYNCHRONOUS = {"diloco": apart.WARM_UP}
"""Steps at the beginning that cost as much as those of exact."""
Curves = dict[str, list[tuple[int, float]]]


def draw(curves: Path, picture: Path) -> None:
    """Draw what ``curves`` has, if that is anything. ``curves``: see ``losses.Runs``."""
    if not curves.exists():
        return
    runs: Curves = json.loads(curves.read_text())
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8))
    _on_the_way(left, runs)
    _by_density(right, runs)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(picture, dpi=120)
    plt.close(figure)


def draw_on_link(curves: Path, rows: Path, picture: Path) -> None:
    """Losses by seconds and by bytes on the link where DDP computes for 5 % of its step, where all of it was measured.

    Steps take as long, and send as much, as those of the transformer that is measured on links; losses are of the small
    model that is trained.
    """
    if not (curves.exists() and rows.exists()):
        return
    runs: Curves = json.loads(curves.read_text())
    measured = {row["name"]: row for row in json.loads(rows.read_text())}
    figure, both = plt.subplots(1, 2, figsize=(10, 3.8))
    for strategy, (label, name, color) in _ON_LINK.items():
        curve = _best(runs, strategy)
        for axes, row, scale in zip(both, ("step_0.05_{}", "bytes_{}"), (3600, 1000), strict=True):
            exact = measured.get(row.format("topk"), {}).get("reference")
            ours = exact if name == "exact" else measured.get(row.format(name), {}).get("ours")
            if curve and ours and exact:
                first = _SYNCHRONOUS.get(name, 0)
                spent = [(min(step, first) * exact + max(0, step - first) * ours) / scale for step, _ in curve]
                axes.plot(spent, [loss for _, loss in curve], label=label, color=color)
    for axes, unit in zip(both, ("hours", "GB that each rank sends"), strict=True):
        axes.set_xscale("log")
        axes.set_xlabel(unit)
        axes.set_ylabel("validation loss, nats a byte")
        axes.spines[["top", "right"]].set_visible(False)
    if both[0].lines:
        both[0].legend(frameon=False)
        figure.tight_layout()
        figure.savefig(picture, dpi=120)
    plt.close(figure)


def _on_the_way(axes: Axes, runs: Curves) -> None:
    """Of the first seed, each at its best rate."""
    for strategy, (label, color) in _WAYS.items():
        if curve := _best(runs, strategy):
            axes.plot(*zip(*curve, strict=True), label=label, color=color)
    axes.set_xlabel("steps")
    axes.set_ylabel("validation loss, nats a byte")


def _best(runs: Curves, strategy: str) -> list[tuple[int, float]] | None:
    """The run of 4,000 steps with the first seed that ends best."""
    found = [curve for key, curve in runs.items() if key.startswith(f"{strategy} 4000 1 ")]
    return min(found, key=lambda curve: curve[-1][1], default=None)


def _by_density(axes: Axes, runs: Curves) -> None:
    """The loss at the end, over that of exact after the same steps, each at its best rate."""
    ends: dict[tuple[str, str], float] = {}
    for key, curve in runs.items():
        strategy, steps, seed, _ = key.split()
        if seed == "1":
            ends[strategy, steps] = min(curve[-1][1], ends.get((strategy, steps), inf))
    for count, marker in (("1000", "o"), ("4000", "s")):
        found = sorted(
            (float(strategy.partition("=")[2]), end / ends["exact", count])
            for (strategy, steps), end in ends.items()
            if strategy.startswith("topk") and steps == count and ("exact", count) in ends
        )
        if found:
            axes.plot(*zip(*found, strict=True), marker=marker, label=f"{count} steps")
    axes.axhline(1, color="0.4", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xlabel("part of the values that top-k sends")
    axes.set_ylabel("loss at the end, over exact")
