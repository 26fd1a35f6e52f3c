"""Spot prices of now, and how they are kept. Moto 5.2 has the same price for everything, so prices are recorded."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

from gpuctl.cluster.errors import BadInput
from gpuctl.stacks.catalog.instance_types import Catalog, Price, catalog, keep_spot_prices, newer, refreshed_path
from gpuctl.stacks.clouds.answers import CredentialsRefused
from gpuctl.stacks.clouds.aws.spot_prices import spot_prices
from gpuctl.stacks.plan.planner import price_of
from tests.fakes.aws.recorded import Answers, answering, query_refusal
from tests.fakes.requests import asked

pytestmark = pytest.mark.usefixtures("aws_account")
P4D = ("p4d.24xlarge", "us-east-1")


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing refreshed before, and nothing left for other tests."""
    monkeypatch.setenv("GPUCTL_STATE_DIR", str(tmp_path / "state"))
    catalog.cache_clear()
    yield
    catalog.cache_clear()


def known(type_: str = P4D[0], region: str = P4D[1]) -> Price:
    (price,) = [price for price in catalog().prices if (price.type, price.region) == (type_, region)]
    return price


def test_the_last_price_of_each_zone_counts_and_the_cheapest_zone_is_the_regions() -> None:
    def told(zone: str, usd: str, hour: int) -> str:
        return (
            f"<item><instanceType>p4d.24xlarge</instanceType><availabilityZone>{zone}</availabilityZone>"
            f"<spotPrice>{usd}</spotPrice><timestamp>2026-11-21T{hour:02}:00:00Z</timestamp></item>"
        )

    history = told("us-east-1b", "2.0", 3) + told("us-east-1b", "11.5", 9)
    history += told("us-east-1a", "9.25", 8) + told("us-east-1a", "7.0", 3)
    answers: Answers = {
        ("ec2", "DescribeSpotPriceHistory"): f"<R><spotPriceHistorySet>{history}</spotPriceHistorySet></R>"
    }
    requests: list[bytes] = []
    (price,) = spot_prices(["us-east-1"], answering(answers, requests), datetime(2026, 11, 21, 12, tzinfo=UTC))
    assert price == Price(
        type="p4d.24xlarge", region="us-east-1", spot=9.25, zones={"us-east-1a": 9.25, "us-east-1b": 11.5}
    )
    assert b"StartTime=2026-11-21T12" in requests[0]
    assert b"Linux%2FUNIX" in requests[0]


def test_several_regions_are_asked() -> None:
    found = spot_prices(["us-east-1", "eu-west-1"])
    assert {price.region for price in found} == {"us-east-1", "eu-west-1"}
    assert {price.spot for price in found} == {0.00001}


def test_credentials_that_have_expired_are_one_line() -> None:
    with pytest.raises(CredentialsRefused, match="have expired; log in"):
        spot_prices(["us-east-1"], answering({("sts", "GetCallerIdentity"): query_refusal("ExpiredToken")}))


def test_what_is_kept_goes_before_the_package_and_leaves_the_rest_as_it_was() -> None:
    before = {(price.type, price.region): price for price in catalog().prices}
    keep_spot_prices([Price(type=P4D[0], region=P4D[1], spot=9.0, zones={"us-east-1a": 9.0})], "2026-11-21")
    price = known()
    assert (price.spot, price.zones, price.spot_date) == (9.0, {"us-east-1a": 9.0}, "2026-11-21")
    assert (price.on_demand, price.date) == (before[P4D].on_demand, before[P4D].date)
    assert price_of(asked("aws")) == price
    assert {key for key, old in before.items() if known(*key) != old} == {P4D}


def test_regions_are_refreshed_one_after_the_other() -> None:
    keep_spot_prices([Price(type=P4D[0], region=P4D[1], spot=9.0)], "2026-11-20")
    keep_spot_prices([Price(type=P4D[0], region="eu-west-1", spot=8.0)], "2026-11-21")
    assert (known().spot, known().spot_date) == (9.0, "2026-11-20")
    assert (known(region="eu-west-1").spot, known(region="eu-west-1").on_demand) == (8.0, None)
    keep_spot_prices([Price(type=P4D[0], region=P4D[1], spot=10.0)], "2026-11-22")
    assert known().spot == 10.0


def test_a_kept_type_that_gpuctl_knows_no_more_is_left_out() -> None:
    keep_spot_prices([Price(type="p1.old", region="us-east-1", spot=1.0)], "2026-11-21")
    assert "p1.old" not in {price.type for price in catalog().prices}


def test_a_later_price_that_a_new_gpuctl_brings_goes_before_what_was_kept() -> None:
    shipped = Catalog(
        date="2026-11-09",
        types=(catalog().type(P4D[0]),),
        prices=(Price(type=P4D[0], region=P4D[1], spot=7.0, spot_date="2026-11-20"),),
    )
    kept = Price(type=P4D[0], region=P4D[1], spot=9.0, spot_date="2026-11-19")
    assert newer(shipped, [kept]) == shipped.prices
    (price,) = newer(shipped, [msgspec.structs.replace(kept, spot_date="2026-11-21")])
    assert (price.spot, price.spot_date) == (9.0, "2026-11-21")


def test_a_kept_file_that_is_none_is_named() -> None:
    refreshed_path().parent.mkdir(parents=True)
    refreshed_path().write_text("{")
    with pytest.raises(
        BadInput, match=r"state/catalog.json is not a catalog: .*delete it, then: gpuctl offers --refresh"
    ):
        catalog()


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gpuctl.cli.main", "offers", *args], capture_output=True, text=True, timeout=90
    )


@pytest.mark.slow
def test_the_verb_refreshes_and_later_lists_the_same_without_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    done = run("--refresh", "--region", "us-east-1", "--gpu", "A100", "-o", "json")
    assert done.returncode == 0, done.stderr
    assert done.stderr.endswith(" of aws in us-east-1\n")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    again = run("--provider", "aws", "--region", "us-east-1", "--gpu", "A100", "-o", "json")
    (p4d,) = [one for one in json.loads(again.stdout)["offers"] if one["name"] == "p4d.24xlarge"]
    assert p4d["spot_usd_per_hour"] == 0.00001
    assert again.stdout == done.stdout
    assert f"spot prices of {p4d['spot_date']}, " in run("--provider", "aws", "--gpu", "A100").stderr
