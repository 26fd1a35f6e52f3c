"""Spot prices of Google Cloud, put together from rows as its billing catalog has them. Words and shapes are Google's,
the amounts are not.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from gpuctl.cluster.errors import GpuctlError
from gpuctl.stacks.catalog.instance_types import catalog
from gpuctl.stacks.clouds.answers import CredentialsRefused
from gpuctl.stacks.clouds.gcp.spot_prices import COMPUTE_ENGINE, spot_prices
from tests.fakes.gcp.api import Google, typed_refusal

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
SKUS = f"/v1/services/{COMPUTE_ENGINE}/skus"
AMERICAS = ("us-central1", "us-east1", "us-west1")


def row(
    description: str,
    usd: float,
    regions: Sequence[str] = AMERICAS,
    *,
    group: str = "CPU",
    usage: str = "Preemptible",
    unit: str = "h",
    since: str = "2026-11-01T07:00:00.123456Z",
) -> dict[str, Any]:
    """Of the catalog, less what nobody reads."""
    nanos = round(usd * 1e9)
    price = {"currencyCode": "USD", "units": str(nanos // 10**9), "nanos": nanos % 10**9}
    expression = {"usageUnit": unit, "tieredRates": [{"startUsageAmount": 0, "unitPrice": price}]}
    return {
        "description": description,
        "category": {"resourceFamily": "Compute", "resourceGroup": group, "usageType": usage},
        "serviceRegions": list(regions),
        "pricingInfo": [{"summary": "", "pricingExpression": expression, "effectiveTime": since}],
    }


def core(of: str, usd: float, **more: Any) -> dict[str, Any]:
    return row(f"Spot Preemptible {of} Instance Core running in Americas", usd, **more)


def ram(of: str, usd: float, **more: Any) -> dict[str, Any]:
    return row(f"Spot Preemptible {of} Instance Ram running in Americas", usd, group="RAM", unit="GiBy.h", **more)


def gpu(of: str, usd: float, **more: Any) -> dict[str, Any]:
    return row(f"Nvidia {of} GPU attached to Spot Preemptible VMs running in Americas", usd, group="GPU", **more)


ALL = [
    *(core("A2", 0.01), ram("A2", 0.001), gpu("Tesla A100", 1.0), gpu("Tesla A100 80GB", 1.5)),
    *(core("A3", 0.02), ram("A3", 0.002), gpu("H100 80GB", 2.0)),
    *(core("G2", 0.03), ram("G2", 0.003), gpu("L4", 0.25)),
    *(core("N1 Predefined", 0.04), ram("N1 Predefined", 0.004), gpu("Tesla T4", 0.1), gpu("Tesla V100", 0.7)),
]
OTHERS = [
    core("A2", 9.0, usage="OnDemand"),
    row("A2 Instance Core running in Americas", 9.0, usage="OnDemand"),
    row("Spot Preemptible A2 Custom Instance Core running in Americas", 9.0),
    row("Spot Preemptible A3Plus Instance Core running in Americas", 9.0),
    row("Nvidia Tesla A100 GPU running in Americas", 9.0, group="GPU", usage="OnDemand"),
    gpu("H100 80GB Mega", 9.0),
    gpu("Tesla K80", 9.0),
    row("Commitment v1: A2 Cpu in Americas for 1 Year", 9.0, usage="Commit1Yr"),
]


@pytest.fixture(autouse=True)
def state(project: Google, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing refreshed before, nothing left for other tests; the catalog is on two pages."""
    project.put(SKUS, [{"skus": [*OTHERS, *ALL[:5]]}, {"skus": [*ALL[5:], *OTHERS]}])
    monkeypatch.setenv("GPUCTL_STATE_DIR", str(tmp_path / "state"))
    catalog.cache_clear()
    yield
    catalog.cache_clear()


def priced(*regions: str) -> dict[tuple[str, str], float | None]:
    return {(price.type, price.region): price.spot for price in spot_prices(regions or ["us-central1"], now=NOW)}


def test_a_machine_costs_its_vcpus_its_memory_and_its_gpus(project: Google) -> None:
    found = priced()
    wanted = {
        "a2-highgpu-8g": 96 * 0.01 + 680 * 0.001 + 8 * 1.0,
        "a2-ultragpu-1g": 12 * 0.01 + 170 * 0.001 + 1.5,
        "a3-highgpu-8g": 208 * 0.02 + 1872 * 0.002 + 8 * 2.0,
        "g2-standard-4": 4 * 0.03 + 16 * 0.003 + 0.25,
        "n1-standard-16+t4x2": 16 * 0.04 + 60 * 0.004 + 2 * 0.1,
        "n1-standard-8+v100x1": 8 * 0.04 + 30 * 0.004 + 0.7,
    }
    assert {name: found[name, "us-central1"] for name in wanted} == pytest.approx(wanted)
    (first, second) = project.requests("/skus")
    assert (first.query["currencyCode"], first.query["pageSize"]) == ("USD", "5000")
    assert second.query["pageToken"] == "1"


def test_every_type_that_is_known_gets_a_price() -> None:
    others = {"a3-edgegpu-8g", "a3-megagpu-8g"}  # whose rows are called something else
    assert {name for name, _ in priced()} == {one.name for one in catalog().types if one.provider == "gcp"} - others


def test_a_row_counts_in_each_of_its_regions_and_in_no_other(project: Google) -> None:
    dearer = [core("A2", 0.5, regions=["europe-west4"]), ram("A2", 0.0, regions=["europe-west4"])]
    project.put(SKUS, {"skus": [*ALL, *dearer, gpu("Tesla A100", 3.0, regions=["europe-west4"])]})
    found = priced("us-central1", "us-east1", "europe-west4", "asia-east1")
    assert found["a2-highgpu-1g", "us-central1"] == found["a2-highgpu-1g", "us-east1"]
    assert {name for name, region in found if region == "europe-west4"} == {
        *(f"a2-highgpu-{n}g" for n in (1, 2, 4, 8)),
        "a2-megagpu-16g",
    }
    assert found["a2-highgpu-1g", "europe-west4"] == pytest.approx(12 * 0.5 + 3.0)
    assert "asia-east1" not in {region for _, region in found}


def test_the_price_in_force_counts_and_not_one_that_has_ended_or_is_to_come(project: Google) -> None:
    l4 = gpu("L4", 0.4)
    l4["pricingInfo"] += gpu("L4", 0.9, since="2026-12-01T00:00:00Z")["pricingInfo"]
    l4["pricingInfo"] += gpu("L4", 0.1, since="2026-10-01T00:00:00Z")["pricingInfo"]
    project.put(SKUS, {"skus": [core("G2", 0.0), ram("G2", 0.0), l4]})
    assert priced()["g2-standard-4", "us-central1"] == 0.4


@pytest.mark.parametrize(
    "part", ["Spot Preemptible G2 Instance Core", "Spot Preemptible G2 Instance Ram", "Nvidia L4 GPU"]
)
def test_a_type_without_a_price_for_one_of_its_parts_has_none(project: Google, part: str) -> None:
    """Half a price would look like a bargain."""
    project.put(SKUS, {"skus": [one for one in ALL if not one["description"].startswith(part)]})
    assert not [name for name, _ in priced() if name.startswith("g2")]


def test_a_price_for_another_unit_is_none_that_we_know(project: Google) -> None:
    by_month = [one | {"pricingInfo": row("", 1.0, unit="mo")["pricingInfo"]} for one in ALL]
    project.put(SKUS, {"skus": by_month})
    assert priced() == {}


def test_a_key_will_do_in_place_of_credentials(project: Google, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS")
    monkeypatch.setenv("GOOGLE_API_KEY", "a-key")
    assert priced()
    assert {one.headers["x-goog-api-key"] for one in project.asked} == {"a-key"}
    assert not any("authorization" in one.headers for one in project.asked)


def test_a_key_that_is_none_is_one_line(project: Google, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOOGLE_API_KEY", "a-key")
    project.put(SKUS, typed_refusal(400, "API key not valid. Please pass a valid API key.", "API_KEY_INVALID"))
    with pytest.raises(GpuctlError, match=r"Google Cloud refused: API key not valid"):
        priced()


def test_credentials_that_have_expired_are_one_line(project: Google) -> None:
    project.answers["POST /token"] = (400, {"error": "invalid_grant", "error_description": "Token has been revoked."})
    with pytest.raises(CredentialsRefused, match="have expired, or were revoked; log in"):
        priced()


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gpuctl.cli.main", "offers", *args], capture_output=True, text=True, timeout=90
    )


def test_the_verb_refreshes_and_later_lists_the_same_without_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    done = run("--refresh", "--provider", "gcp", "--gpu", "A100-40GB", "-o", "json")
    assert done.returncode == 0, done.stderr
    assert done.stderr.endswith("29 spot prices of gcp in us-central1\n")
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS")
    again = run("--provider", "gcp", "--gpu", "A100-40GB", "-o", "json")
    (smallest, *_) = sorted(json.loads(again.stdout)["offers"], key=lambda one: one["gpus"])
    assert (smallest["name"], smallest["spot_usd_per_hour"]) == ("a2-highgpu-1g", pytest.approx(1.205))
    assert again.stdout == done.stdout


def test_the_verb_tells_how_many_types_have_no_spot_price(project: Google) -> None:
    project.put(SKUS, {"skus": ALL[:4]})
    done = run("--refresh", "--provider", "gcp")
    assert done.stderr.splitlines()[:3] == [
        "region: us-central1 (the default)",
        "no spot price in us-central1 for 22 types: a3-edgegpu-8g, a3-highgpu-1g, a3-highgpu-2g and 19 more",
        "9 spot prices of gcp in us-central1",
    ]
