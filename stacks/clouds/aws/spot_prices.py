"""Current prices of spot machines: ``DescribeSpotPriceHistory``, the same that the console's price history shows."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

from gpuctl.stacks.catalog.instance_types import Price, catalog, region_of
from gpuctl.stacks.clouds.aws.client import Connect, connecting, understood, who

_AT_ONCE = 8


def spot_prices(regions: Sequence[str], connect: Connect | None = None, now: datetime | None = None) -> list[Price]:
    """See ``Cloud``. A region's price is that of its cheapest zone."""
    connect = connect or connecting()
    for region in regions[:1]:
        who(connect, region)  # credentials that are refused are told once, and in words
    clients = [connect("ec2", region) for region in regions]
    now = now or datetime.now(UTC)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        asked = [pool.submit(_of_region, client, region, now) for client, region in zip(clients, regions, strict=True)]
        return [price for answer in asked for price in answer.result()]


def _of_region(ec2: Any, region: str, now: datetime) -> list[Price]:
    """A history that begins now holds what is in force: the last change of each type and zone."""
    types = [machine.name for machine in catalog().types if machine.provider == "aws" and machine.spot]
    latest: dict[tuple[str, str], tuple[datetime, float]] = {}
    with understood():
        pages = ec2.get_paginator("describe_spot_price_history").paginate(
            StartTime=now, InstanceTypes=types, ProductDescriptions=["Linux/UNIX"]
        )
        for told in (told for page in pages for told in page["SpotPriceHistory"]):
            place = (told["InstanceType"], told["AvailabilityZone"])
            since = (told["Timestamp"], float(told["SpotPrice"]))
            if place not in latest or since[0] > latest[place][0]:
                latest[place] = since
    zones: dict[str, dict[str, float]] = {}
    for (name, zone), (_, usd) in sorted(latest.items()):
        zones.setdefault(name, {})[zone] = usd
    return [Price(type=name, region=region, spot=min(of.values()), zones=of) for name, of in zones.items()]


def price_history(
    kind: str, zone: str, since: float, until: float, connect: Connect | None = None
) -> list[tuple[float, float]]:
    """The spot prices of a type over time; see ``Cloud``. AWS remembers 90 days.

    Args:
        kind: instance type.
        zone: availability zone, such as ``us-east-1a``.
        since: beginning of the time asked about, in seconds since the epoch.
        until: its end, in seconds since the epoch.
        connect: makes the clients of boto3; ``None``: with the credentials of the environment.
    """
    ec2 = (connect or connecting())("ec2", region_of("aws", zone))
    with understood():
        pages = ec2.get_paginator("describe_spot_price_history").paginate(
            StartTime=datetime.fromtimestamp(since, UTC),
            EndTime=datetime.fromtimestamp(until, UTC),
            InstanceTypes=[kind],
            AvailabilityZone=zone,
            ProductDescriptions=["Linux/UNIX"],
        )
        told = [
            (one["Timestamp"].timestamp(), float(one["SpotPrice"]))
            for page in pages
            for one in page["SpotPriceHistory"]
        ]
    return sorted(told)
