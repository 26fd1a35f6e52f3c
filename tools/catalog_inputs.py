"""Readers of what ``tools/catalog.py`` puts together: each takes a file of its source, and gives rows of our own.

Repositories lie as git has them, so that a row's source can name the commit; a directory is as good as a bare clone.
"""

from __future__ import annotations

import csv
import gzip
import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

Row = dict[str, Any]
_FIRST_CARD = "efa"
_GBPS = re.compile(r"(?:(\d+)x )?([\d.]+) Gigabit")


class Told(NamedTuple):
    """What a machine costs in a region, as somebody has told it."""

    type: str
    region: str
    kind: str
    """``on_demand`` or ``spot``."""
    usd: float
    date: str
    source: str


@dataclass(frozen=True)
class Repository:
    """One that lies in ``root``, as ``owner/name`` or ``owner+name``, with its files as of ``HEAD``."""

    name: str
    root: Path

    def text(self, path: str) -> str:
        return self._git("show", f"HEAD:{path}")

    def commit(self) -> str:
        return self._git("rev-parse", "HEAD").strip()

    def date(self, path: str) -> str:
        """Of the file's last change that the clone has."""
        return self._git("log", "-1", "--format=%cs", "--", path).strip()

    def _git(self, *args: str) -> str:
        at = self.root / self.name
        done = subprocess.run(["git", "-C", str(at), *args], capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{at}: git {args[0]} failed: {done.stderr.strip()}")
        return done.stdout


# -- AWS --------------------------------------------------------------------------------------------------------------


def aws_types(described: Path, gpus: dict[str, Row], source: str) -> Iterator[Row]:
    """From answers of ``DescribeInstanceTypes``, by name, as moto keeps them. Left out: GPUs that are not NVIDIA's or
    come in parts, processors that are not x86, bare metal, and types whose first card takes no EFA where others do."""
    for name, one in sorted(json.loads(gzip.decompress(described.read_bytes())).items()):
        gpu = _nvidia(one)
        if gpu is None or one["BareMetal"] or "x86_64" not in one["ProcessorInfo"]["SupportedArchitectures"]:
            continue
        network = one["NetworkInfo"]
        cards = network.get("EfaInfo", {}).get("MaximumEfaInterfaces", 0)
        if cards and _FIRST_CARD not in network["NetworkCards"][0].get("InterfaceTypes", [_FIRST_CARD]):
            continue
        memory = round(gpu["MemoryInfo"]["SizeInMiB"] / 1024)
        known = gpus.get(gpu["Name"]) or gpus[f"{gpu['Name']}/{memory}"]
        yield {
            "provider": "aws",
            "name": name,
            "family": name.partition(".")[0],
            "gpu": known["name"],
            "gpus": gpu["Count"],
            "gpu_memory_gb": known["gpu_memory_gb"],
            "vcpus": one["VCpuInfo"]["DefaultVCpus"],
            "memory_gb": one["MemoryInfo"]["SizeInMiB"] / 1024,
            "network_gbps": _gbps(network),
            **({"fabric": "efa", "fabric_cards": cards} if cards else {}),
            **({} if "spot" in one["SupportedUsageClasses"] else {"spot": False}),
            "source": source,
        }


def aws_regions(offerings: Path) -> dict[str, set[str]]:
    """Types that each region sells, from answers of ``DescribeInstanceTypeOfferings``."""
    return {
        path.name.partition(".")[0]: {one["InstanceType"] for one in json.loads(gzip.decompress(path.read_bytes()))}
        for path in offerings.glob("*.json.gz")
    }


def karpenter_aws(text: str, source: str) -> Iterator[Told]:
    """On demand, Linux: ``zz_generated.pricing_aws.go``."""
    (date,) = re.findall(r"// generated at (\d{4}-\d\d-\d\d)T", text)
    region = ""
    for line in text.splitlines():
        if begins := re.fullmatch(r'\s*"([a-z0-9-]+)": \{', line):
            region = begins[1]
        for name, usd in re.findall(r'"([a-z0-9-]+\.[a-z0-9-]+)": ([\d.]+)', line):
            yield Told(name, region, "on_demand", float(usd), date, source)


def _nvidia(one: Row) -> Row | None:
    for gpu in one.get("GpuInfo", {}).get("Gpus", ()):
        if gpu["Manufacturer"] == "NVIDIA" and gpu["Count"] >= 1:
            return dict(gpu)
    return None


def _gbps(network: Row) -> float:
    """What it has at all times: "up to" is for minutes. The sum of the cards is more than some types may use."""
    told = _GBPS.fullmatch(network["NetworkPerformance"])
    if told:
        return float(told[1] or 1) * float(told[2])
    return sum(float(card["BaselineBandwidthInGbps"]) for card in network["NetworkCards"])


# -- Google -----------------------------------------------------------------------------------------------------------


def gcp_shapes(text: str) -> dict[str, tuple[int, float]]:
    """vCPUs and GB of memory of each machine type: ``tools/machinetypes.csv``."""
    rows = csv.DictReader(text.splitlines(), delimiter=";")
    return {row["NAME"]: (int(row["CPUS"]), float(row["MEMORY_GB"])) for row in rows}


def gcp_sold(text: str) -> dict[str, set[str]]:
    """Types, or kinds of GPUs, that each region sells: ``machinetyperegion.csv`` and ``acceleratortyperegion.csv``."""
    sold: dict[str, set[str]] = {}
    for row in csv.DictReader(text.splitlines(), delimiter=";"):
        sold.setdefault(row["ZONE"], set()).add(row["NAME"])
    return sold


def gcp_regions(text: str) -> list[str]:
    return [row["NAME"] for row in csv.DictReader(text.splitlines(), delimiter=";")]


def karpenter_gcp(text: str, date: str, source: str) -> Iterator[Told]:
    """``initial-prices.json``. GPUs that are hung on a machine are not in its price."""
    for region, kinds in json.loads(text)["prices"].items():
        for kind, prices in kinds.items():
            for name, usd in prices.items():
                yield Told(name, region, kind, round(usd, 6), date, source)


# -- Azure ------------------------------------------------------------------------------------------------------------


def karpenter_azure(text: str, source: str) -> Iterator[Told]:
    """On demand, Linux: ``zz_generated.pricing.go``."""
    (date,) = re.findall(r"// generated at (\d{4}-\d\d-\d\d)T", text)
    region = ""
    for line in text.splitlines():
        if begins := re.search(r'initialOnDemandPrices\["([a-z0-9]+)"\] = ', line):
            region = begins[1]
        for name, usd in re.findall(r'"(Standard_[A-Za-z0-9_-]+)": +([\d.]+)', line):
            yield Told(name, region, "on_demand", float(usd), date, source)


def azure_regions(text: str) -> list[str]:
    """Those that are places, of an answer of ``locations``."""
    return [one["name"] for one in json.loads(text) if one["metadata"]["regionType"] == "Physical"]


# -- dstack's gpuhunt -------------------------------------------------------------------------------------------------


def gpuhunt(text: str, version: str, source: str) -> Iterator[Told]:
    """A published catalog of a provider: ``catalog.zip`` of https://dstack-gpu-pricing.s3.eu-west-1.amazonaws.com/v3.
    Google's rows are of zones; of these the cheapest is the region's."""
    date = datetime.strptime(version[:8], "%Y%m%d").date().isoformat()
    for row in csv.DictReader(text.splitlines()):
        if not row["gpu_name"]:
            continue
        kind = "spot" if row["spot"] == "True" else "on_demand"
        region = re.sub(r"(\d)-[a-z]$", r"\1", row["location"])
        name = row["instance_name"]
        if name.startswith("n1-"):
            name = f"{name}+{row['gpu_name'].lower()}x{row['gpu_count']}"
        yield Told(name, region, kind, float(row["price"]), date, source)
