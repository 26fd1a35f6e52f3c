"""Which zones of a region to try, the best first."""

from __future__ import annotations

from typing import Any

from gpuctl.cluster.errors import GpuctlError
from gpuctl.stacks.aws.account import Connect, connecting, understood
from gpuctl.stacks.aws.offers import spot_prices
from gpuctl.stacks.request import StackRequest


def zones(request: StackRequest, connect: Connect | None = None) -> tuple[str, ...]:
    """Those that sell the type: by AWS's own score of how likely as many spot machines are (1 to 10), which few may
    ask, then by price. Raises ``GpuctlError``."""
    connect = connect or connecting()
    ec2 = connect("ec2", request.region)
    with understood():
        pages = ec2.get_paginator("describe_instance_type_offerings").paginate(
            LocationType="availability-zone", Filters=[{"Name": "instance-type", "Values": [request.type]}]
        )
        sold = sorted({offer["Location"] for page in pages for offer in page["InstanceTypeOfferings"]})
    if not request.spot:
        return tuple(sold)
    prices = _prices(request, connect)
    scores = _scores(request, ec2)
    return tuple(sorted(sold, key=lambda zone: (-scores.get(zone, 0), prices.get(zone, float("inf")), zone)))


def _prices(request: StackRequest, connect: Connect) -> dict[str, float]:
    told = (price.zones for price in spot_prices([request.region], connect) if price.type == request.type)
    return next(told, {})


def _scores(request: StackRequest, ec2: Any) -> dict[str, int]:
    """By zone; empty if AWS does not tell: a right of its own, and a quota of few questions a day."""
    try:
        with understood():
            names = {
                zone["ZoneId"]: zone["ZoneName"] for zone in ec2.describe_availability_zones()["AvailabilityZones"]
            }
            answer = ec2.get_spot_placement_scores(
                InstanceTypes=[request.type],
                TargetCapacity=request.nodes_max,
                SingleAvailabilityZone=True,
                RegionNames=[request.region],
            )
    except GpuctlError:
        return {}
    scored = answer["SpotPlacementScores"]
    return {names[one["AvailabilityZoneId"]]: one["Score"] for one in scored if one.get("AvailabilityZoneId") in names}
