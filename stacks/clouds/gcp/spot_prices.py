"""Current prices of spot machines, put together from the price list of Google's billing: of each region the price of a
vCPU and of a GB of the machines' family, and of a GPU. Rows of A2 and A3 are of the host alone, too.

The bundled local SSDs of ``a2-ultragpu`` and ``a3-highgpu`` are not in it; they are one or two hundredths of the whole.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from gpuctl.stacks.catalog.instance_types import MachineType, Price, catalog
from gpuctl.stacks.clouds.gcp.client import Answer, GcpAccount, entering, entering_with_key

COMPUTE_ENGINE = "6F81-5844-456A"
"""Of the billing catalog's services."""
_PAGE = 5000
"""The most there is. All of it is some 40 000 rows."""
_KEY_FROM = "GOOGLE_API_KEY"
_HOST = re.compile(r"(?:Spot )?Preemptible (A2|A3|G2|N1 Predefined) Instance (Core|Ram) running in .+")
_GPU = re.compile(r"Nvidia (?:Tesla )?(\w+(?: 80GB)?) GPU attached to (?:Spot )?Preemptible VMs running in .+")
_GPU_NAMES = {
    "A100": "A100-40GB",
    "A100 80GB": "A100-80GB",
    "H100 80GB": "H100-80GB",
    "L4": "L4",
    "T4": "T4",
    "V100": "V100-16GB",
}
_FAMILIES = ("a2-highgpu", "a2-megagpu", "a2-ultragpu", "a3-highgpu", "g2", "n1")
"""The rows above are of. A3 Mega and A3 Edge have others."""
_UNITS = {"Core": "h", "Ram": "GiBy.h", "GPU": "h"}


class PricedPart(NamedTuple):
    """A part of a machine that has a price per hour in a region."""

    region: str
    what: str
    """``Core`` or ``Ram`` of a family such as ``a2``, or ``GPU`` of a kind such as ``L4``."""
    of: str


def spot_prices(regions: Sequence[str], account: GcpAccount | None = None, now: datetime | None = None) -> list[Price]:
    """See ``Cloud``. What has no price for one of its parts is left out. An API key in
    ``GOOGLE_API_KEY`` will do in place of credentials: the list is the same for everybody."""
    key = os.environ.get(_KEY_FROM)
    account = account or (entering_with_key(key) if key else entering().log_in())
    parts = _parts(account, regions, now or datetime.now(UTC))
    machines = [machine for machine in catalog().types if machine.family in _FAMILIES and machine.spot]
    told = ((machine, region, _usd(machine, region, parts)) for region in regions for machine in machines)
    return [
        Price(type=machine.name, region=region, spot=round(usd, 6)) for machine, region, usd in told if usd is not None
    ]


def _usd(machine: MachineType, region: str, parts: dict[PricedPart, float]) -> float | None:
    family = machine.family.partition("-")[0]
    of = {
        PricedPart(region, "Core", family): machine.vcpus,
        PricedPart(region, "Ram", family): machine.memory_gb,
        PricedPart(region, "GPU", machine.gpu): machine.gpus,
    }
    return sum(parts[part] * many for part, many in of.items()) if parts.keys() >= of.keys() else None


def _parts(account: GcpAccount, regions: Sequence[str], now: datetime) -> dict[PricedPart, float]:
    path = f"v1/services/{COMPUTE_ENGINE}/skus"
    pages = account.pages("cloudbilling", path, currencyCode="USD", pageSize=_PAGE)
    rows = (row for page in pages for row in page.get("skus", ()))
    return {part: usd for row in rows for part, usd in _priced(row, now) if part.region in regions}


def _priced(row: Answer, now: datetime) -> Iterator[tuple[PricedPart, float]]:
    """Nothing for a row of something else."""
    if row["category"]["usageType"] != "Preemptible":
        return
    if host := _HOST.fullmatch(row["description"]):
        what, of = host[2], host[1].partition(" ")[0].lower()
    elif (gpu := _GPU.fullmatch(row["description"])) and gpu[1] in _GPU_NAMES:
        what, of = "GPU", _GPU_NAMES[gpu[1]]
    else:
        return
    usd = _in_force(row.get("pricingInfo", ()), _UNITS[what], now)
    if usd is not None:
        for region in row.get("serviceRegions", ()):
            yield PricedPart(region, what, of), usd


def _in_force(prices: Sequence[Answer], unit: str, now: datetime) -> float | None:
    """The latest that has begun, if it is for the unit we reckon in."""
    begun = [price for price in prices if _time(price) <= now]
    if not begun:
        return None
    expression = max(begun, key=_time)["pricingExpression"]
    if expression["usageUnit"] != unit or not expression.get("tieredRates"):
        return None
    usd: dict[str, Any] = expression["tieredRates"][-1]["unitPrice"]
    return float(usd.get("units", 0)) + float(usd.get("nanos", 0)) / 1e9


def _time(price: Answer) -> datetime:
    told = price.get("effectiveTime")
    return datetime.fromisoformat(told) if told else datetime.min.replace(tzinfo=UTC)
