"""The demo's picture: loss over steps of both runs, and where nodes were lost and came back."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")  # before pyplot looks for a screen

import matplotlib.pyplot as plt
from matplotlib.ticker import LogLocator, NullFormatter

from gpuctl.cli.render.job.timeline import Point, RoundSpan, kept


def draw(path: Path, calm: Sequence[Point], rough: Sequence[Point], lived: Sequence[RoundSpan], title: str) -> None:
    """Write the demo's picture.

    Args:
        path: of the file, whose suffix tells its format.
        calm: points of the undisturbed run.
        rough: points of the run that lost nodes.
        lived: rounds of the run that lost nodes, in order.
        title: stands above the picture.
    """
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
    for index, round_span in enumerate(lived):
        step = round_span.first.step
        nodes.fill_between(
            [step, round_span.last_step], round_span.nodes, step="post", color="tab:blue", alpha=0.35, linewidth=0
        )
        if index:
            lost = round_span.nodes < lived[index - 1].nodes
            colour = "tab:red" if lost else "tab:green"
            for axes in (losses, nodes):
                axes.axvline(step, color=colour, linewidth=1, linestyle="--")
            losses.annotate(
                label(round_span.reason),
                (step, 0.97 - 0.055 * (index % 4)),
                xycoords=("data", "axes fraction"),
                xytext=(4, 0),
                textcoords="offset points",
                va="top",
                fontsize=8.5,
                color=colour,
            )
    losses.legend(loc="lower left", frameon=False)
    nodes.set_ylim(0, max(round_span.nodes for round_span in lived) + 0.5)
    nodes.set_ylabel("nodes")
    nodes.set_xlabel("optimizer step")
    for axes in (losses, nodes):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def label(reason: str) -> str:
    """The reason why a round began, without the seconds that were left of a notice: the next line is near.

    >>> label("node-2 given notice, 29.7 of 30 s left; node-1 lost")
    'node-2 given notice; node-1 lost'
    """
    return re.sub(r", [\d.]+ of [\d.]+ s left", "", reason)


def _curve(points: Sequence[Point]) -> tuple[list[int], list[float]]:
    shown = [(point.step, point.loss) for point in kept(points) if point.loss is not None]
    return [step for step, _ in shown], [loss for _, loss in shown]
