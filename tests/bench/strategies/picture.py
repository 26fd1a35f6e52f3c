"""What compression costs, as a picture: validation losses on the way, and how they end at several densities."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")  # before pyplot looks for a screen

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

_WAYS = {
    "exact": ("exact", "0.4"),
    "powersgd:rank=4": ("PowerSGD, rank 4", "tab:orange"),
    "topk:ratio=0.01": ("top-k, 1 %", "tab:blue"),
}
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


def _on_the_way(axes: Axes, runs: Curves) -> None:
    """Of the first seed, at the rate that all methods share."""
    longest = max((int(key.split()[1]) for key in runs if key.startswith("exact")), default=0)
    rate = next((key.split()[3] for key in runs if key.startswith("powersgd")), None)
    for strategy, (label, color) in _WAYS.items():
        if curve := runs.get(f"{strategy} {longest} 1 {rate}"):
            axes.plot(*zip(*curve, strict=True), label=label, color=color)
    axes.set_xlabel("steps")
    axes.set_ylabel("validation loss, nats a byte")


def _by_density(axes: Axes, runs: Curves) -> None:
    """The loss at the end, over that of exact after the same steps."""
    ends = {tuple(key.split()): curve[-1][1] for key, curve in runs.items()}
    for steps, marker in (("1000", "o"), ("4000", "s")):
        found = sorted(
            (float(strategy.partition("=")[2]), end / ends["exact", steps, "1", rate])
            for (strategy, count, seed, rate), end in ends.items()
            if strategy.startswith("topk") and (count, seed) == (steps, "1") and ("exact", steps, "1", rate) in ends
        )
        if found:
            axes.plot(*zip(*found, strict=True), marker=marker, label=f"{steps} steps")
    axes.axhline(1, color="0.4", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xlabel("part of the values that top-k sends")
    axes.set_ylabel("loss at the end, over exact")
