"""The zones of a region to try, the best first."""

from __future__ import annotations

from typing import Any

from gpuctl.stacks.clouds.aws.client import Connect, connecting, understood
from gpuctl.stacks.clouds.aws.spot_prices import spot_prices
from gpuctl.stacks.request.stack_request import StackRequest


def zones(request: StackRequest, connect: Connect | None = None) -> tuple[str, ...]:
    """Those that sell the type: as spot by price, the cheapest first. Raises ``GpuctlError``.

    AWS's placement score is not asked: "if you specify one or two instance types … the returned placement score will
    always be low" (API reference, GetSpotPlacementScores), and a cluster has one type. It would take a right and a
    quota of its own, and order nothing.
    """
    connect = connect or connecting()
    ec2 = connect("ec2", request.region)
    with understood():
        pages = ec2.get_paginator("describe_instance_type_offerings").paginate(
            LocationType="availability-zone", Filters=[{"Name": "instance-type", "Values": [request.type]}]
        )
        sold = {offer["Location"] for page in pages for offer in page["InstanceTypeOfferings"]}
        usual = sold & {
            zone["ZoneName"] for zone in ec2.describe_availability_zones()["AvailabilityZones"] if _is_usual(zone)
        }
    prices = _prices(request, connect) if request.spot else {}
    return tuple(sorted(usual, key=lambda zone: (prices.get(zone, float("inf")), zone)))


def _is_usual(zone: dict[str, Any]) -> bool:
    """No Local Zone, such as us-west-2-lax-1a, and no Wavelength Zone: they are dearer, have no NAT gateways or no EFA,
    and sort before us-west-2a."""
    return (
        zone.get("ZoneType", "availability-zone") == "availability-zone"
        and zone.get("State") != "unavailable"
        and zone.get("OptInStatus") != "not-opted-in"
    )


def _prices(request: StackRequest, connect: Connect) -> dict[str, float]:
    told = (price.zones for price in spot_prices([request.region], connect) if price.type == request.type)
    return next(told, {})
