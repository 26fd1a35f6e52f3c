"""``make catalog``: rows from what its sources look like, and the file from rows."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from tests.paths import ROOT
from tools import catalog_inputs as inputs
from tools.catalog import _prices, rendered
from tools.catalog_inputs import Told

GPUS = {"L4": {"name": "L4", "gpu_memory_gb": 24}, "A100/40": {"name": "A100-40GB", "gpu_memory_gb": 40}}


def described(gpu: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """An answer of ``DescribeInstanceTypes``, as far as it is read."""
    card = {"BaselineBandwidthInGbps": 2.5, "InterfaceTypes": ["interface", "efa"]}
    usual = {
        "BareMetal": False,
        "GpuInfo": {"Gpus": [{"Manufacturer": "NVIDIA", "Count": 1, "MemoryInfo": {"SizeInMiB": 22888}} | gpu]},
        "MemoryInfo": {"SizeInMiB": 16384},
        "NetworkInfo": {"NetworkPerformance": "Up to 10 Gigabit", "NetworkCards": [card]},
        "ProcessorInfo": {"SupportedArchitectures": ["x86_64"]},
        "SupportedUsageClasses": ["on-demand", "spot"],
        "VCpuInfo": {"DefaultVCpus": 4},
    }
    return {**usual, **changes}


def test_types_are_read_from_what_aws_answers(tmp_path: Path) -> None:
    network = {"NetworkPerformance": "4x 100 Gigabit", "EfaInfo": {"MaximumEfaInterfaces": 4}}
    cards = [{"BaselineBandwidthInGbps": 200.0, "InterfaceTypes": ["interface", "efa"]}] * 4
    without = [{"BaselineBandwidthInGbps": 300.0, "InterfaceTypes": ["interface"]}]
    answers = {
        "g6.xlarge": described({"Name": "L4"}),
        "p4d.24xlarge": described(
            {"Name": "A100", "Count": 8, "MemoryInfo": {"SizeInMiB": 40960}},
            NetworkInfo={**network, "NetworkCards": cards},
            SupportedUsageClasses=["on-demand"],
        ),
        "g6f.large": described({"Name": "L4", "Count": 0}),
        "g4ad.xlarge": described({"Name": "Radeon", "Manufacturer": "AMD"}),
        "g5g.xlarge": described({"Name": "T4g"}, ProcessorInfo={"SupportedArchitectures": ["arm64"]}),
        "g4dn.metal": described({"Name": "L4"}, BareMetal=True),
        "p6-b300.48xlarge": described({"Name": "B300"}, NetworkInfo={**network, "NetworkCards": without}),
    }
    path = tmp_path / "types.json.gz"
    path.write_bytes(gzip.compress(json.dumps(answers).encode()))
    small, large = inputs.aws_types(path, GPUS, "moto")
    assert (small["name"], small["network_gbps"], small["gpu_memory_gb"]) == ("g6.xlarge", 2.5, 24)
    assert "fabric" not in small
    assert "spot" not in small
    assert (large["name"], large["network_gbps"], large["fabric_cards"]) == ("p4d.24xlarge", 400.0, 4)
    assert (large["gpu"], large["spot"]) == ("A100-40GB", False)


def test_prices_of_karpenter_are_read_with_their_day() -> None:
    text = """// generated at 2026-07-20T13:44:30Z for us-east-1
	"us-east-1": {
		"g5.xlarge": 1.006000, "p6-b200.48xlarge": 113.932800,
"""
    assert list(inputs.karpenter_aws(text, "k")) == [
        Told("g5.xlarge", "us-east-1", "on_demand", 1.006, "2026-07-20", "k"),
        Told("p6-b200.48xlarge", "us-east-1", "on_demand", 113.9328, "2026-07-20", "k"),
    ]
    text = """// generated at 2026-06-18T03:43:41Z
	initialOnDemandPrices["eastus"] = map[string]float64{
		"Standard_NC4as_T4_v3":   0.526000,
"""
    assert [one[:4] for one in inputs.karpenter_azure(text, "k")] == [
        ("Standard_NC4as_T4_v3", "eastus", "on_demand", 0.526)
    ]


def test_a_published_catalog_of_gpuhunt_is_read() -> None:
    text = """instance_name,location,price,cpu,memory,gpu_count,gpu_name,gpu_memory,spot,disk_size,gpu_vendor,flags
n1-standard-4,us-central1-a,0.21,4,15,1,T4,16,True,,nvidia,
g5.xlarge,eu-west-1,1.123,4,16,1,A10G,24,False,,nvidia,
m5.large,eu-west-1,0.1,2,8,0,,,False,,,
"""
    assert list(inputs.gpuhunt(text, "20261109-2", "gpuhunt-x")) == [
        Told("n1-standard-4+t4x1", "us-central1", "spot", 0.21, "2026-11-09", "gpuhunt-x"),
        Told("g5.xlarge", "eu-west-1", "on_demand", 1.123, "2026-11-09", "gpuhunt-x"),
    ]


def test_the_latest_price_counts_and_the_cheapest_zone_of_a_day() -> None:
    told = [
        Told("a", "r1", "spot", 2.0, "2026-11-01", "new"),
        Told("a", "r1", "spot", 3.0, "2026-11-01", "new"),
        Told("a", "r1", "spot", 1.0, "2026-10-01", "old"),
        Told("a", "r1", "on_demand", 4.0, "2026-10-01", "old"),
    ]
    dates = {"date": "2026-10-01", "spot_date": "2026-11-01"}
    assert _prices([{"name": "a"}], told, {("a", "r2")}) == [
        {"type": "a", "region": "r1", "on_demand": 4.0, "spot": 2.0, **dates, "source": "new old"},
        {"type": "a", "region": "r2"},
    ]


def test_what_is_written_is_what_is_there() -> None:
    """The same rows give the same bytes, so a difference is one of rows."""
    path = ROOT / "stacks" / "catalog" / "catalog.json"
    assert rendered(json.loads(path.read_text())) == path.read_text()
    assert path.stat().st_size < 400_000
