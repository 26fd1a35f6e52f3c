"""The demo's picture: loss over steps of both runs, and where nodes were lost and came back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")  # before pyplot looks for a screen

import matplotlib.pyplot as plt
from matplotlib.ticker import LogLocator, NullFormatter

from gpuctl.cli.timeline import Point, Stretch, kept


def draw(path: Path, calm: Sequence[Point], rough: Sequence[Point], lived: Sequence[Stretch], title: str) -> None:
    """Write a PNG to ``path``."""
    figure, (losses, nodes) = plt.subplots(
        2, 1, figsize=(10, 6), height_ratios=(4, 1), sharex=True, layout="constrained"
    )
    losses.plot(*_curve(calm), color="0.72", linewidth=5, label="undisturbed")
    losses.plot(*_curve(rough), color="tab:blue", linewidth=1.4, label="while nodes come and go")
    losses.set_yscale("log")
    losses.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    losses.yaxis.set_major_formatter("{x:g}")
    losses.yaxis.set_minor_formatter(NullFormatter())
    losses.set_ylabel("training loss")
    losses.set_title(title, loc="left")
    for index, stretch in enumerate(lived):
        step = stretch.first.step
        nodes.fill_between(
            [step, stretch.last_step], stretch.nodes, step="post", color="tab:blue", alpha=0.35, linewidth=0
        )
        if index:
            lost = stretch.nodes < lived[index - 1].nodes
            colour = "tab:red" if lost else "tab:green"
            for axes in (losses, nodes):
                axes.axvline(step, color=colour, linewidth=1, linestyle="--")
            losses.annotate(
                stretch.reason,
                (step, 0.97 - 0.055 * (index % 4)),
                xycoords=("data", "axes fraction"),
                xytext=(4, 0),
                textcoords="offset points",
                va="top",
                fontsize=8.5,
                color=colour,
            )
    losses.legend(loc="lower left", frameon=False)
    nodes.set_ylim(0, max(stretch.nodes for stretch in lived) + 0.5)
    nodes.set_ylabel("nodes")
    nodes.set_xlabel("optimizer step")
    for axes in (losses, nodes):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _curve(points: Sequence[Point]) -> tuple[list[int], list[float]]:
    shown = [(point.step, point.loss) for point in kept(points) if point.loss is not None]
    return [step for step, _ in shown], [loss for _, loss in shown]
