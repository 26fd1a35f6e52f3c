"""Whether a method learns as well: the validation loss of ``charlm`` after the same tokens, and the time to DDP's."""

from __future__ import annotations

from statistics import mean

from tests.bench.settings import Settings
from tests.bench.strategies import launch, links
from tests.bench.strategies.links import POWER_SGD, TOP_K
from tests.bench.table import Row

STEPS = 4000
SEEDS = (1, 2, 3)
RATES = (2e-3, 4e-3, 8e-3)
WARM_UP = ",warmup_steps=400"
"""A tenth of the steps."""
LONGER = {TOP_K: 1.25, POWER_SGD: 1.1}
"""How many times as many steps a method may take to come to DDP's loss."""
LOSS_BARS = {TOP_K: 1.02, POWER_SGD: 1.01}
TIME_BARS = {TOP_K: 1 / 8, POWER_SGD: 1 / 5}
_LINK = 0.05


def losses(settings: Settings) -> list[Row]:
    """The mean of three seeds, each at the rate that is best for DDP."""
    count, seeds = (400, SEEDS[:1]) if settings.fast else (STEPS, SEEDS)
    best = {rate: _last("exact", count, seeds[0], rate) for rate in RATES}
    rate = min(best, key=lambda one: best[one])
    exact = {seed: best[rate] if seed == seeds[0] else _last("exact", count, seed, rate) for seed in seeds}
    with launch.machines() as net:
        link = links.link_of(net, _LINK)
        step_s = {method: links.step_s(net, method) for method in LOSS_BARS}
    rows = []
    for method, bar in LOSS_BARS.items():
        name, chosen = links.short(method), method + (WARM_UP if method == TOP_K else "")
        found = {seed: _last(chosen, count, seed, rate) for seed in seeds}
        ratios = [found[seed] / exact[seed] for seed in seeds]
        note = f"{count} steps at rate {rate:g}; seeds {', '.join(f'{ratio:.4f}' for ratio in ratios)}"
        ours, theirs = mean(found.values()), mean(exact.values())
        rows.append(Row(f"loss_{name}", ours, theirs, "nats", f"<= {bar:g} x", mean(ratios) <= bar, note))
        rows.append(_time(method, chosen, count, seeds, rate, exact, step_s[method], link))
    return rows


def _time(
    method: str,
    chosen: str,
    count: int,
    seeds: tuple[int, ...],
    rate: float,
    exact: dict[int, float],
    step_s: float,
    link: links.Link,
) -> Row:
    """Steps to DDP's last loss, by a run that is longer, times the seconds of a step at the link. The losses do not
    depend on the link, so they are not waited for over it."""
    longer = round(count * LONGER[method])
    found = {seed: _last(chosen, longer, seed, rate) for seed in seeds}
    arrived = mean(found.values()) <= mean(exact.values())
    ours, theirs, bar = longer * step_s, count * link.ddp_s, TIME_BARS[method]
    note = (
        f"{longer} steps of {step_s:.2f} s (loss {mean(found.values()):.4f}) and {count} of {link.ddp_s:.2f} s "
        f"(loss {mean(exact.values()):.4f}) at {link.mbit:.0f} Mbit/s"
    )
    name = f"time_to_loss_{links.short(method)}"
    if not arrived:
        return Row(name, "not reached", theirs, "s", f"<= {bar:.3g} x", False, note)
    return Row(name, ours, theirs, "s", f"<= {bar:.3g} x", ours / theirs <= bar, note)


def _last(strategy: str, count: int, seed: int, rate: float) -> float:
    told = launch.ranks(None, "tests.bench.strategies.curve", strategy, str(count), str(seed), repr(rate))
    return float(told[-1][1])
