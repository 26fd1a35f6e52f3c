"""``gpuctl cost``: stays in a bucket, prices of moto's history and of the catalog."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpuctl.cluster import layout
from gpuctl.cluster.records.codec import encode
from gpuctl.cluster.records.nodes import MachineUsage
from gpuctl.cluster.storage.bucket import open_bucket
from gpuctl.stacks.catalog.billing import Prices, bill, spent
from gpuctl.stacks.catalog.instance_types import catalog

HOUR = 3600.0
ON_DEMAND = 1.006
"""Of a g5.xlarge in us-east-1, by the catalog."""


def usage(node: str = "a", life: str = "spot", hours: float = 2.0, kind: str = "g5.xlarge") -> MachineUsage:
    return MachineUsage(node=node, type=kind, zone="us-east-1b", life=life, since=10 * HOUR, until=(10 + hours) * HOUR)


@pytest.mark.parametrize(
    ("prices", "usd"),
    [
        ([(0.0, 0.5)], 1.0),
        ([(0.0, 0.5), (11 * HOUR, 1.5)], 2.0),
        ([(0.0, 9.0), (9 * HOUR, 0.5), (11.5 * HOUR, 2.5)], 2.0),
        ([(11 * HOUR, 0.5)], 1.0),
        ([(0.0, 0.5), (99 * HOUR, 7.0)], 1.0),
    ],
    ids=["one", "a rise half-way", "changes before and within", "told late", "changes after"],
)
def test_each_hour_is_paid_at_the_price_in_force(prices: Prices, usd: float) -> None:
    assert spent(10 * HOUR, 12 * HOUR, prices) == pytest.approx(usd)


def test_a_bill_has_both_prices_of_every_machine() -> None:
    made = bill("aws", [usage(), usage("b", "on-demand", 1.0)], lambda *_: [(0.0, 0.4)])
    assert [line.usd for line in made.lines] == pytest.approx([0.8, ON_DEMAND])
    assert (made.usd, made.on_demand_usd, made.unknown) == pytest.approx((0.8 + ON_DEMAND, 3 * ON_DEMAND, 0))


def test_a_price_that_nobody_told_is_not_taken_for_nothing() -> None:
    known = {price.type: price.spot for price in catalog().prices if price.region == "us-east-1"}
    assert known["g5.xlarge"] is None, "the test needs a type without a spot price"
    made = bill("aws", [usage()], lambda *_: ())
    assert (made.lines[0].usd, made.unknown) == (None, 1)


def _cost(folder: Path, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gpuctl.cli.main", "cost", "--bucket", folder.as_uri(), *args],
        env={**os.environ, "GPUCTL_STATE_DIR": str(folder.parent / "state"), **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.slow
def test_of_a_cluster_that_is_gone_by_its_bucket(tmp_path: Path, s3_endpoint: str) -> None:
    folder = tmp_path / "bucket"
    store = open_bucket(folder.as_uri())
    for node in ("i-1", "i-2"):
        store.put(layout.machine_usage(node), encode(usage(node)))
    account = {"AWS_ENDPOINT_URL": s3_endpoint, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    done = _cost(folder, **account)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["NODE", "TYPE", "ZONE", "BOOTED", "HOURS", "$", "$", "ON", "DEMAND"]
    assert lines[1].split()[:3] == ["i-1", "g5.xlarge", "us-east-1b"] and lines[1].split()[-1] == "2.01"
    assert lines[-1].endswith(f"on demand: ${4 * ON_DEMAND:.2f}")
    told = json.loads(_cost(folder, "-o", "json", **account).stdout)
    assert [line["hours"] for line in told["lines"]] == [2.0, 2.0]
    assert told["usd"] > 0 and not told["lines"][0]["by_catalog"], "moto's history was not asked"


@pytest.mark.slow
def test_without_credentials_the_catalog_must_do_and_that_is_said(tmp_path: Path) -> None:
    folder = tmp_path / "bucket"
    open_bucket(folder.as_uri()).put(layout.machine_usage("i-1"), encode(usage()))
    none = {"AWS_CONFIG_FILE": "/none", "AWS_SHARED_CREDENTIALS_FILE": "/none", "AWS_EC2_METADATA_DISABLED": "true"}
    done = _cost(folder, **none, AWS_ACCESS_KEY_ID="", AWS_SECRET_ACCESS_KEY="")
    assert done.returncode == 0, done.stderr
    assert "past prices of aws are not available: no AWS credentials found" in done.stderr
    assert "not included: 1 machine without a known price" in done.stderr


def test_local_nodes_cost_nothing(tmp_path: Path) -> None:
    (tmp_path / "bucket").mkdir()
    done = _cost(tmp_path / "bucket")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "nothing was rented\n")
