"""Instance types with GPUs, as the clouds' pages have them: what a plan must know of a machine before there is one.

``catalog.json`` in this folder holds them, with prices, their dates and their sources; ``offers`` reads the prices.
``tools/catalog.py`` writes it; it says which rows are by hand.
``gpuctl offers --refresh`` keeps newer spot prices below the user's state directory, and they go before.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec

from gpuctl.cluster.atomic_write import write_atomic
from gpuctl.cluster.errors import BadInput
from gpuctl.stacks.state.paths import state_dir

CloudName = Literal["aws", "gcp", "azure"]
CLOUDS: tuple[CloudName, ...] = ("aws", "gcp", "azure")
_BEFORE_TURING = ("V100",)
Fabric = Literal["", "efa", "infiniband", "gvnic"]
"""The fastest network between two machines of a type: ``efa`` and ``infiniband`` bypass the kernel, ``gvnic`` is fast
Ethernet, and empty is the usual one."""


def cloud_named(name: str) -> CloudName | None:
    """``None``: no cloud has that name."""
    return next((one for one in CLOUDS if one == name), None)


def region_of(provider: CloudName, zone: str) -> str:
    """
    >>> region_of("aws", "us-east-1a"), region_of("gcp", "us-central1-a"), region_of("azure", "eastus-2")
    ('us-east-1', 'us-central1', 'eastus')
    """
    return re.sub(r"[a-z]$" if provider == "aws" else r"-[a-z0-9]$", "", zone)


_FAST_NETWORK_GBPS = 50
"""More than cheap machines with one GPU have, whose way to their disk is narrow too."""


class MachineType(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One instance type, shape or size."""

    provider: CloudName
    name: str
    """The cloud's own. Google hangs GPUs on general machines, so a type there may have them in its name:
    ``n1-standard-8+t4x1`` is ``n1-standard-8`` with one T4 (see ``gcp.shape``)."""
    family: str
    """What quotas and placement go by, such as ``p4d``."""
    gpu: str
    """Such as ``A100-40GB``: with the memory where there are several."""
    gpus: int
    gpu_memory_gb: float
    """Of each GPU."""
    vcpus: int
    memory_gb: float
    network_gbps: float
    """Of the fastest network between two machines, all of its cards together that gpuctl makes use of."""
    fabric: Fabric = ""
    fabric_cards: int = 0
    """Network cards with ``fabric``. EFA wants an interface for each."""
    spot: bool = True
    """Whether it is sold as spot at all."""

    @property
    def takes_fast_disk(self) -> bool:
        """Whether its root disk is to be faster than a usual one: the type can use it, and its price justifies it."""
        return self.gpus > 1 or self.network_gbps >= _FAST_NETWORK_GBPS

    @property
    def before_turing(self) -> bool:
        """Its GPUs are older than what NVIDIA's open kernel modules and PyTorch's wheels work with: Turing and newer
        (github.com/NVIDIA/open-gpu-kernel-modules, "Compatible GPUs"; no ``sm_70`` in the wheels for CUDA 13)."""
        return self.gpu.startswith(_BEFORE_TURING)


class Price(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The price of one machine for an hour, in US dollars. A row without any says that the region sells the type."""

    type: str
    region: str
    on_demand: float | None = None
    spot: float | None = None
    """``None``: not known."""
    zones: dict[str, float] = {}
    """Spot price by zone, where it differs."""
    date: str = ""
    """When it was looked up, as YYYY-MM-DD; empty: on the catalog's date."""
    spot_date: str = ""
    """When ``spot`` and ``zones`` were, if that was another day."""
    source: str = ""
    """Of the prices: the first words of some of the catalog's ``sources``."""


class Catalog(msgspec.Struct, frozen=True, kw_only=True):
    """The instance types and prices in ``catalog.json``."""

    date: str
    """When the prices were looked up, as YYYY-MM-DD."""
    types: tuple[MachineType, ...]
    prices: tuple[Price, ...]
    sources: tuple[str, ...] = ()
    """Who said so, of types and of prices, and when."""
    regions: dict[str, tuple[str, ...]] = {}
    """All that there are, by provider, with GPUs or without."""

    def type(self, name: str, provider: str | None = None) -> MachineType:
        """Raises ``BadInput`` with the names that are most like it."""
        known = {one.name: one for one in self.types if provider in (None, one.provider)}
        if name in known:
            return known[name]
        near = difflib.get_close_matches(name, known, 3, 0.4) or sorted(known)[:3]
        raise BadInput(
            f"unknown instance type {name!r}{f' on {provider}' if provider else ''}",
            f"did you mean {', '.join(near)}? (all: gpuctl offers)",
        )


@cache
def catalog(path: Path | None = None) -> Catalog:
    """The one in the package, with the spot prices that were refreshed since; or the one at ``path``. Raises
    ``BadInput`` for a file that is none."""
    if path:
        return _read(path)
    shipped = _read(Path(__file__).with_name("catalog.json"))
    fresh = _refreshed()
    return msgspec.structs.replace(shipped, prices=newer(shipped, fresh.prices)) if fresh else shipped


def refreshed_path() -> Path:
    return state_dir() / "catalog.json"


def keep_spot_prices(prices: Sequence[Price], day: str) -> None:
    """Keep spot prices, which ``catalog`` prefers from now on, looked up on ``day``, and those that were kept before of
    other types and regions. Raises ``BadInput`` if what was kept cannot be read."""
    before = _refreshed()
    kept = {(price.type, price.region): price for price in (before.prices if before else ())}
    for price in prices:
        told = Price(type=price.type, region=price.region, spot=price.spot, zones=price.zones, spot_date=day)
        kept[price.type, price.region] = told
    fresh = Catalog(date=day, types=(), prices=tuple(kept[key] for key in sorted(kept)))
    path = refreshed_path()
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_atomic(path, msgspec.json.format(msgspec.json.encode(fresh)))
    catalog.cache_clear()


def newer(shipped: Catalog, fresh: Sequence[Price]) -> tuple[Price, ...]:
    """All prices, with the later spot price of each; a new gpuctl may have brought later ones than were kept, or know
    a type no more."""
    types = {machine.name for machine in shipped.types}
    prices = {(price.type, price.region): price for price in shipped.prices}
    for price in fresh:
        key = (price.type, price.region)
        old = prices.get(key)
        if price.type not in types:
            continue
        if old is None:
            prices[key] = price
        elif old.spot is None or price.spot_date >= (old.spot_date or old.date or shipped.date):
            prices[key] = msgspec.structs.replace(old, spot=price.spot, zones=price.zones, spot_date=price.spot_date)
    return tuple(prices.values())


def _refreshed() -> Catalog | None:
    path = refreshed_path()
    return _read(path) if path.exists() else None


def _read(path: Path) -> Catalog:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Catalog)
    except (OSError, msgspec.MsgspecError) as error:
        raise BadInput(f"{path} is not a catalog: {error}", "delete it, then: gpuctl offers --refresh") from error
