"""64 agents in threads: how soon they agree on a round, and how many requests they make of the bucket, a folder."""

from __future__ import annotations

from statistics import median

from tests.bench.settings import Settings
from tests.bench.steplog import spread
from tests.bench.table import Row
from tests.cluster.scale import Measured, measure

BAR_S = 5.0
BAR_GROWTH = 1.5
"""Requests per node at 64 nodes beside those at 8: all of them grow as N, not as N squared."""
_SIZES = (8, 16, 32, 64)


def mingle(settings: Settings) -> Row:
    """Through the bucket alone, without direct contact, from before the first agent starts."""
    largest = [_measured(settings, _SIZES[-1], run) for run in range(settings.runs)]
    found = [*(_measured(settings, nodes, 0) for nodes in _SIZES[:-1]), largest[0]]
    per_node = {m.nodes: m.requests_per_s / m.nodes for m in found}
    growth = per_node[_SIZES[-1]] / per_node[_SIZES[0]]
    seconds = [m.seconds for m in largest]
    rates = ", ".join(f"{nodes}: {rate:.2f}" for nodes, rate in per_node.items())
    note = f"{spread(seconds)} in {len(seconds)} runs; requests/s per node at N = {rates} (x {growth:.2f})"
    met = max(seconds) <= BAR_S and growth <= BAR_GROWTH and all(m.rounds == 1 for m in [*found, *largest])
    bar = f"<= {BAR_S:g} s, requests as N"
    return Row("mingle_64", median(seconds), None, "s", bar, met, note)


def _measured(settings: Settings, nodes: int, run: int) -> Measured:
    return measure(nodes, (settings.root / f"mingle-{nodes}-{run}").as_uri())
