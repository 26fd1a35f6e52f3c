"""Whether a method learns as well: the validation loss of ``charlm`` after the same tokens, and the time to DDP's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import mean

from tests.bench.settings import Settings
from tests.bench.strategies import launch, links
from tests.bench.strategies.links import POWER_SGD, TOP_K
from tests.bench.table import Row

STEPS = 4000
SEEDS = (1, 2, 3)
RATES = (8e-3, 16e-3, 32e-3, 64e-3)
CURVES = launch.ROOT / "build" / "bench-strategies-curves.json"
LONGER = {TOP_K: 1.25, POWER_SGD: 1.1}
"""How many times as many steps a method may take to come to DDP's loss."""
LOSS_BARS = {TOP_K: 1.02, POWER_SGD: 1.01}
TIME_BARS = {TOP_K: 1 / 8, POWER_SGD: 1 / 5}
DENSITIES = (0.1, 0.03, 0.01, 0.001)
SHORT = 1000
_LINK = 0.05
_NEAR = 1.01
"""Losses at two rates that are no further apart may change places with another seed."""


@dataclass
class Runs:
    """Training runs, each made once."""

    curves: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    """By strategy, steps, seed and rate: steps and validation losses."""

    def last(self, strategy: str, count: int, seed: int, rate: float) -> float:
        """The loss at the end. Top-k's ratio comes down over the first tenth of the steps."""
        chosen = f"{strategy},warmup_steps={count // 10}" if strategy.startswith("topk") else strategy
        key = f"{strategy} {count} {seed} {rate:g}"
        if key not in self.curves:
            arguments = (chosen, str(count), str(seed), repr(rate))
            self.curves[key] = launch.ranks(None, "tests.bench.strategies.curve", *arguments)
            kept = json.loads(CURVES.read_text()) if CURVES.exists() else {}
            CURVES.write_text(json.dumps({**kept, **self.curves}))
        return self.curves[key][-1][1]

    def best_rate(self, strategy: str, count: int, seeds: Sequence[int] = SEEDS) -> float:
        """The rate that is best for ``strategy``, by the mean of all ``seeds`` where that of the first one does not
        tell them apart."""
        first = {rate: self.last(strategy, count, seeds[0], rate) for rate in RATES}
        near = [rate for rate in RATES if first[rate] <= _NEAR * min(first.values())]
        return min(near, key=lambda rate: mean(self.last(strategy, count, seed, rate) for seed in seeds))


RUNS = Runs()
"""Several rows share them."""


def losses(settings: Settings) -> list[Row]:
    """The mean of three seeds, each way at its own best rate."""
    runs = RUNS
    count, seeds = (400, SEEDS[:1]) if settings.fast else (STEPS, SEEDS)
    rate = runs.best_rate("exact", count, seeds)
    exact = [runs.last("exact", count, seed, rate) for seed in seeds]
    rows = []
    longer: dict[str, list[float]] = {}
    for method, bar in LOSS_BARS.items():
        own = runs.best_rate(method, count, seeds)
        found = [runs.last(method, count, seed, own) for seed in seeds]
        ratios = [ours / theirs for ours, theirs in zip(found, exact, strict=True)]
        of_seeds = ", ".join(f"{ratio:.4f}" for ratio in ratios)
        note = f"{count} steps at rate {own:g}, DDP's at {rate:g}; seeds {of_seeds}"
        met = mean(ratios) <= bar
        rows.append(Row(f"loss_{links.short(method)}", mean(found), mean(exact), "nats", f"<= {bar:g} x", met, note))
        longer[method] = [runs.last(method, round(count * LONGER[method]), seed, own) for seed in seeds]
    rows += _times(count, longer, mean(exact))
    return rows + ([] if settings.fast else densities(runs, rate, runs.best_rate(TOP_K, count, seeds)))


def densities(runs: Runs, rate: float, own: float) -> list[Row]:
    """Top-k at several densities, in a short run and a long one: where it does not learn as well, too."""
    rows = []
    for count in (SHORT, STEPS):
        exact = runs.last("exact", count, SEEDS[0], rate)
        for density in DENSITIES:
            ours = runs.last(f"topk:ratio={density:g}", count, SEEDS[0], own)
            rows.append(Row(f"loss_topk_{density:g}_{count}", ours, exact, "nats", "", None))
    return rows


def _times(count: int, longer: dict[str, list[float]], exact: float) -> list[Row]:
    """Steps to DDP's last loss, by a run that is longer, times the seconds of a step at the link. The losses do not
    depend on the link, so they are not waited for over it."""
    with launch.machines() as net:
        link = links.link_of(net, _LINK)
        step_s = {method: links.step_s(net, method) for method in longer}
    rows = []
    for method, found in longer.items():
        steps, bar = round(count * LONGER[method]), TIME_BARS[method]
        ours, theirs = steps * step_s[method], count * link.ddp_s
        note = (
            f"{steps} steps of {step_s[method]:.2f} s (loss {mean(found):.4f}) and {count} of {link.ddp_s:.2f} s "
            f"(loss {exact:.4f}) at {link.mbit:.0f} Mbit/s"
        )
        arrived = mean(found) <= exact
        name, most = f"time_to_loss_{links.short(method)}", f"<= {bar:.3g} x"
        shown: float | str = ours if arrived else "not reached"
        rows.append(Row(name, shown, theirs, "s", most, arrived and ours / theirs <= bar, note))
    return rows
