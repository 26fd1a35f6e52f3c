"""The cost of a cluster's machines: their stays, by the spot prices that were in force, and on demand.

Only machines: volumes, addresses, what goes through a NAT gateway and the bucket come on top, and are on the cloud's
own bill. A cloud that tells no history is reckoned with the catalog's price, and the bill says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec

from gpuctl.cluster.records.nodes import MachineUsage
from gpuctl.stacks.catalog.instance_types import CloudName, Price, catalog, region_of

Prices = Sequence[tuple[float, float]]
"""Since when (seconds since the epoch), US dollars per hour; the oldest first."""
History = Callable[[str, str, float, float], Prices]
"""Spot prices of a type in a zone between two times; empty: nobody tells."""


class BillLine(msgspec.Struct, frozen=True, kw_only=True):
    """One machine's line of a bill."""

    usage: MachineUsage
    hours: float
    usd: float | None
    """``None``: nobody has told us the price."""
    on_demand_usd: float | None
    by_catalog: bool
    """The price is one of some day, and not that of the hours in question."""


class Bill(msgspec.Struct, frozen=True, kw_only=True):
    lines: tuple[BillLine, ...]
    usd: float
    """Of all whose price is known."""
    on_demand_usd: float
    unknown: int
    """Machines whose price nobody has told."""


def bill(provider: CloudName, usages: Iterable[MachineUsage], history: History) -> Bill:
    lines = tuple(_line(provider, usage, history) for usage in usages)
    return Bill(
        lines=lines,
        usd=sum(line.usd or 0.0 for line in lines),
        on_demand_usd=sum(line.on_demand_usd or 0.0 for line in lines),
        unknown=sum(line.usd is None for line in lines),
    )


def spent(since: float, until: float, prices: Prices) -> float:
    """US dollars from ``since`` to ``until``. Before the first price told, that one counts.

    >>> spent(0, 7200, [(0, 1.0), (3600, 3.0)])
    4.0
    """
    total = 0.0
    ends = [*(at for at, _ in prices[1:]), until]
    for number, ((begin, usd), end) in enumerate(zip(prices, ends, strict=True)):
        low = since if number == 0 else max(since, begin)
        total += usd * max(0.0, min(until, end) - low) / 3600
    return total


def _line(provider: CloudName, usage: MachineUsage, history: History) -> BillLine:
    hours = max(0.0, usage.until - usage.since) / 3600
    price = _price(provider, usage)
    on_demand = None if price is None or price.on_demand is None else price.on_demand * hours
    if usage.life != "spot":
        return BillLine(usage=usage, hours=hours, usd=on_demand, on_demand_usd=on_demand, by_catalog=True)
    told = history(usage.type, usage.zone, usage.since, usage.until)
    if told:
        usd: float | None = spent(usage.since, usage.until, told)
    else:
        spot = None if price is None else price.zones.get(usage.zone, price.spot)
        usd = None if spot is None else spot * hours
    return BillLine(usage=usage, hours=hours, usd=usd, on_demand_usd=on_demand, by_catalog=not told)


def _price(provider: CloudName, usage: MachineUsage) -> Price | None:
    region = region_of(provider, usage.zone)
    return next((one for one in catalog().prices if (one.type, one.region) == (usage.type, region)), None)
