"""Which zones of a region are tried on AWS."""

from __future__ import annotations

import pytest

from gpuctl.stacks.clouds.aws.zones import zones
from tests.fakes.aws.recorded import Answers, answering
from tests.fakes.requests import asked

pytestmark = pytest.mark.usefixtures("aws_account")


def answers(*listed: tuple[str, str, str]) -> Answers:
    """Of zones, with their type and whether they are enabled, all of which sell the machine."""
    described = "".join(
        f"<item><zoneName>{name}</zoneName><zoneType>{kind}</zoneType><optInStatus>{opted}</optInStatus>"
        "<zoneState>available</zoneState></item>"
        for name, kind, opted in listed
    )
    sold = "".join(f"<item><location>{name}</location></item>" for name, _, _ in listed)
    prices = "".join(
        f"<item><instanceType>p4d.24xlarge</instanceType><availabilityZone>{name}</availabilityZone>"
        f"<spotPrice>{usd}</spotPrice><timestamp>2026-11-22T00:00:00Z</timestamp></item>"
        for name, usd in (("us-west-2a", 9), ("us-west-2c", 7), ("us-west-2-lax-1a", 1))
    )
    return {
        ("ec2", "DescribeAvailabilityZones"): f"<R><availabilityZoneInfo>{described}</availabilityZoneInfo></R>",
        ("ec2", "DescribeInstanceTypeOfferings"): f"<R><instanceTypeOfferingSet>{sold}</instanceTypeOfferingSet></R>",
        ("ec2", "DescribeSpotPriceHistory"): f"<R><spotPriceHistorySet>{prices}</spotPriceHistorySet></R>",
    }


USUAL = ("availability-zone", "opt-in-not-required")
ALL = (
    ("us-west-2-lax-1a", "local-zone", "opted-in"),
    ("us-west-2b", *USUAL),
    ("us-west-2a", *USUAL),
    ("us-west-2c", *USUAL),
    ("us-west-2d", "availability-zone", "not-opted-in"),
)


def found(*, spot: bool) -> tuple[str, ...]:
    request = asked("aws", region="us-west-2", zones=(), spot=spot)
    return zones(request, answering(answers(*ALL)))


def test_spot_goes_to_the_cheapest_zone_and_never_to_a_local_one() -> None:
    assert found(spot=True) == ("us-west-2c", "us-west-2a", "us-west-2b")


def test_on_demand_goes_by_name_and_never_to_a_local_zone() -> None:
    assert found(spot=False) == ("us-west-2a", "us-west-2b", "us-west-2c")
