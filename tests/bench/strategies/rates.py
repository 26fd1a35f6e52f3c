"""What the frame costs: steps a second beside the same algorithm as a plain hook of DDP's, on an unlimited link."""

from __future__ import annotations

from statistics import median, quantiles

from tests.bench.settings import Settings
from tests.bench.strategies import launch
from tests.bench.strategies.bare import BARE
from tests.bench.strategies.rank import BLOCK
from tests.bench.table import Row

BAR = 0.98


def rates(settings: Settings) -> list[Row]:
    """In turns, in the same processes."""
    blocks = 8 if settings.fast else 40
    rows = []
    for strategy in BARE:
        told = launch.ranks(None, "tests.bench.strategies.rank", "pairs", strategy, str(blocks))["pairs"]
        frame, bare = (BLOCK / median(seconds) for seconds in zip(*told, strict=True))
        ratios = sorted(by_hand / by_frame for by_frame, by_hand in told)
        low, _, high = quantiles(ratios, n=4)
        note = f"ratio: median of {len(told)} pairs of {BLOCK} steps, the middle half of them {low:.3f}-{high:.3f}"
        ratio = median(ratios)
        name = f"rate_{strategy.partition(':')[0]}"
        rows.append(Row(name, frame, bare, "steps/s", f">= {BAR:g} x", ratio >= BAR, note, paired=ratio))
    return rows
