"""Instance types with GPUs, as the clouds' pages have them: what a plan must know of a machine before there is one.

``catalog.json`` in this folder holds them, with prices, their dates and their sources; ``offers`` reads the prices.
"""

from __future__ import annotations

import difflib
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec

from gpuctl.cluster.errors import BadInput

CloudName = Literal["aws", "gcp", "azure"]
CLOUDS: tuple[CloudName, ...] = ("aws", "gcp", "azure")
Fabric = Literal["", "efa", "infiniband", "gvnic"]
"""The fastest network between two machines of a type: ``efa`` and ``infiniband`` bypass the kernel, ``gvnic`` is fast
Ethernet, and empty is the usual one."""


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


class Price(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Of one machine for an hour, in US dollars."""

    type: str
    region: str
    on_demand: float | None = None
    spot: float | None = None
    """``None``: nobody has told us."""
    zones: dict[str, float] = {}
    """Spot price by zone, where it differs."""
    date: str = ""
    """When it was looked up, as YYYY-MM-DD; empty: on the catalog's date."""


class Catalog(msgspec.Struct, frozen=True, kw_only=True):
    """``catalog.json``."""

    date: str
    """When the prices were looked up, as YYYY-MM-DD."""
    types: tuple[MachineType, ...]
    prices: tuple[Price, ...]
    sources: tuple[str, ...] = ()
    """Who said so, of types and of prices, and when."""

    def type(self, name: str, provider: str | None = None) -> MachineType:
        """Raises ``BadInput`` with the names that are most like it."""
        known = {one.name: one for one in self.types if provider in (None, one.provider)}
        if name in known:
            return known[name]
        near = difflib.get_close_matches(name, known, 3, 0.4) or sorted(known)[:3]
        raise BadInput(
            f"{name!r} is no instance type{f' of {provider}' if provider else ''} that gpuctl knows",
            f"did you mean {', '.join(near)}? (all: gpuctl offers)",
        )


@cache
def catalog(path: Path | None = None) -> Catalog:
    """The one in the package, or a refreshed one. Raises ``BadInput`` for a file that is none."""
    path = path or Path(__file__).with_name("catalog.json")
    try:
        return msgspec.json.decode(path.read_bytes(), type=Catalog)
    except (OSError, msgspec.MsgspecError) as error:
        raise BadInput(f"{path} is no catalog: {error}", "delete it, or refresh it: gpuctl offers --refresh") from error
