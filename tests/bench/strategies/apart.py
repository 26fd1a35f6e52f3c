"""Workers that train apart: how much of their time they compute on slow links, and what they learn by then."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import mean, median

from tests.bench.network import Network
from tests.bench.settings import Settings
from tests.bench.strategies import launch, links
from tests.bench.strategies.losses import RUNS, SEEDS, STEPS
from tests.bench.table import Row

WARM_UP = 100
"""Synchronous steps at the beginning: their traffic is counted."""
EVERY = 50
LONGER = 1.1
"""How many times as many steps it may take to come to DDP's loss."""
GRID_EVERY = (1, 8, 32, 128)
GRID_MBIT = (50, 200, 1000, 5000)
"""Those of github.com/Adnan082/diloco-measured: four L40S, 30.8 million parameters."""
_LOSS_BAR, _TIME_BAR, _PART_BAR = 1.01, 1 / 10, 0.95
_TIMED_LINK = 0.05


def diloco(every: int, warm_up: int = WARM_UP) -> str:
    """As ``--strategy`` has it."""
    return f"diloco:every={every},warmup_steps={warm_up}"


def utilisation(settings: Settings) -> list[Row]:
    """Beside what arithmetic allows: 1 / (1 + T_comm / (H · T_step))."""
    rows = []
    with launch.machines() as net:
        for part in (0.2,) if settings.fast else links.UTILISATIONS:
            link = links.link_of(net, part)
            took = _computing(net, EVERY)
            met = took.part >= _PART_BAR * took.allowed
            note = f"{link.mbit:.1f} Mbit/s, where DDP computes for {link.compute_s / link.ddp_s:.1%}: {took.note}"
            name = f"utilisation_{part:g}_diloco"
            rows.append(Row(name, took.part, took.allowed, "of the time", f">= {_PART_BAR:g} x", met, note))
            rows.append(Row(f"step_{part:g}_diloco", took.outer_s / EVERY, link.ddp_s, "s", "", None))
        sent = took.sent / EVERY / 1e6
        rows.append(Row("bytes_diloco", sent, links.step(net, "exact", 3)["sent"] / 1e6, "MB a step", "", None))
    return rows


def losses(settings: Settings) -> list[Row]:
    """After the same tokens, H = 50 at three seeds and others at one; and the time to DDP's loss on one link."""
    runs = RUNS
    count, seeds = (400, SEEDS[:1]) if settings.fast else (STEPS, SEEDS)
    rate, own = (runs.best_rate(strategy, count, seeds) for strategy in ("exact", diloco(EVERY)))
    exact = [runs.last("exact", count, seed, rate) for seed in seeds]
    found = [runs.last(diloco(EVERY), count, seed, own) for seed in seeds]
    ratios = [ours / theirs for ours, theirs in zip(found, exact, strict=True)]
    of_seeds = ", ".join(f"{ratio:.4f}" for ratio in ratios)
    note = f"{count} steps at rate {own:g}, DDP's at {rate:g}; seeds {of_seeds}"
    met = mean(ratios) <= _LOSS_BAR
    rows = [Row(f"loss_diloco_{EVERY}", mean(found), mean(exact), "nats", f"<= {_LOSS_BAR:g} x", met, note)]
    for strategy in (
        () if settings.fast else (diloco(1), diloco(10), diloco(100), diloco(EVERY, 0), "localsgd:every=50")
    ):
        ours = runs.last(strategy, count, seeds[0], own)
        rows.append(Row(f"loss_{strategy}", ours, exact[0], "nats", "", None))
    longer = [runs.last(diloco(EVERY), round(count * LONGER), seed, own) for seed in seeds]
    return [*rows, _time_to_loss(count, mean(longer), mean(exact))]


def _time_to_loss(count: int, ours: float, theirs: float) -> Row:
    """Of a run that is ``LONGER``. The losses do not depend on the link, so they are not waited for over it."""
    steps = round(count * LONGER)
    with launch.machines() as net:
        link = links.link_of(net, _TIMED_LINK)
        of_outer = median(links.apart(net, diloco(EVERY, 0), 2)["seconds"])
    took = WARM_UP * link.ddp_s + (steps - WARM_UP) / EVERY * of_outer
    note = (
        f"{steps} steps, {WARM_UP} of them synchronous and of {link.ddp_s:.2f} s, then {EVERY} in {of_outer:.2f} s "
        f"(loss {ours:.4f}); DDP: {count} of {link.ddp_s:.2f} s (loss {theirs:.4f}) at {link.mbit:.0f} Mbit/s"
    )
    shown: float | str = took if ours <= theirs else "not reached"
    met = ours <= theirs and took / (count * link.ddp_s) <= _TIME_BAR
    return Row("time_to_loss_diloco", shown, count * link.ddp_s, "s", f"<= {_TIME_BAR:g} x", met, note)


def unlike(_: Settings) -> list[Row]:
    """Four workers, one of which has a third of the others' processor: as many steps for each, and by speed."""
    every, parts = 12, (0.45, 0.45, 0.45, 0.15)
    rows, took = [], {}
    for balance in ("equal", "speed"):
        strategy = f"localsgd:every={every},balance={balance}"
        told = launch.ranks(None, "tests.bench.strategies.unlike", strategy, "4", ",".join(map(str, parts)))
        took[balance] = median(told["seconds"])
        made = ", ".join(str(of[-1]) for of in told["made"])
        of_cores = ", ".join(f"{part:g}" for part in parts)
        note = f"workers made {made} steps in the last outer step, with {of_cores} of a core"
        rate = every * launch.RANKS / took[balance]
        allowed = every * launch.RANKS / took["equal"] * sum(parts) / launch.RANKS / min(parts)
        bar, met = (">= 0.85 x", rate >= 0.85 * allowed) if balance == "speed" else ("", None)
        reference = allowed if balance == "speed" else None
        rows.append(Row(f"unlike_{balance}", rate, reference, "steps/s of all", bar, met, note))
    return rows


def grid(settings: Settings) -> list[Row]:
    """The published grid: links and H, and what is learned with each H."""
    rows = []
    with launch.machines() as net:
        for mbit in GRID_MBIT:
            for machine in range(launch.RANKS):
                net.shape(machine, 10_000)
            compute = links.step_s(net, "compute")
            for machine in range(launch.RANKS):
                net.shape(machine, mbit)
            ddp = links.step_s(net, "exact")
            rows.append(Row(f"grid_{mbit}_ddp", compute / ddp, None, "of the time", "", None))
            for every in GRID_EVERY:
                took = _computing(net, every)
                rows.append(Row(f"grid_{mbit}_h{every}", took.part, took.allowed, "of the time", "", None, took.note))
    runs = RUNS
    count, seeds = (400, SEEDS[:1]) if settings.fast else (STEPS, SEEDS)
    rate, own = (runs.best_rate(strategy, count, seeds) for strategy in ("exact", diloco(EVERY)))
    exact = runs.last("exact", count, SEEDS[0], rate)
    for every in GRID_EVERY:
        ours = runs.last(diloco(every), count, SEEDS[0], own)
        note = f"{count} steps, {(count - WARM_UP) // every} outer steps"
        rows.append(Row(f"grid_loss_h{every}", ours, exact, "nats", "", None, note))
    return rows


@dataclass(frozen=True, slots=True)
class _Took:
    """What an outer step took."""

    step_s: float
    """Of computing alone."""
    exchange_s: float
    """Of an exchange alone."""
    outer_s: float
    every: int
    sent: float

    @property
    def part(self) -> float:
        """Of the time, that workers compute."""
        return self.every * self.step_s / self.outer_s

    @property
    def allowed(self) -> float:
        """The same, by arithmetic."""
        return 1 / (1 + self.exchange_s / (self.every * self.step_s))

    @property
    def note(self) -> str:
        return (
            f"{self.every} steps of {self.step_s:.3f} s and an exchange of {self.exchange_s:.2f} s took "
            f"{self.outer_s:.2f} s"
        )


def _computing(net: Network, every: int) -> _Took:
    step_s, exchange_s = links.step_s(net, "compute"), links.step_s(net, "network")
    told = links.apart(net, diloco(every, 0), max(2, 8 // every))
    return _Took(step_s, exchange_s, median(told["seconds"]), every, told["sent"])
