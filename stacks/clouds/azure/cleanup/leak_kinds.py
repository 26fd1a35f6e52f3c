"""Kinds of things that a cluster may leave on Azure: who lists each, what there is to tell of it, and what it costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from gpuctl.stacks.catalog.instance_types import catalog
from gpuctl.stacks.clouds.azure import PREMIUM_USD_PER_MONTH, PUBLIC_ADDRESS_USD_PER_HOUR
from gpuctl.stacks.clouds.azure.client import Answer, AzureAccount
from gpuctl.stacks.clouds.interface import HOURS_A_MONTH

_NAT_USD_PER_HOUR = 0.045
"""And for each GB besides; not looked up: see azure.microsoft.com/pricing/details/azure-nat-gateway."""
FREE = {
    "microsoft.managedidentity/userassignedidentities": "identity",
    "microsoft.network/routetables": "route table",
    "microsoft.compute/sshpublickeys": "public key",
    "microsoft.compute/proximityplacementgroups": "proximity placement group",
}
"""What only the resource manager is asked for and costs nothing, and our words for it."""


def _nothing(_: Answer) -> float | None:
    return 0.0


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of thing that one of Azure's providers lists by itself."""

    what: str
    type: str
    """As the resource manager calls it, in small letters."""
    things: Callable[[AzureAccount], Iterable[Any]]
    """Models of ``azure-mgmt-compute`` or ``azure-mgmt-network``."""
    about: tuple[str, ...] = ()
    """What to tell of it: keys of an answer, a dot between them."""
    usd: Callable[[Answer], float | None] = _nothing
    """For an hour. ``None``: it costs something."""

    @property
    def many(self) -> str:
        return f"{self.what}es" if self.what.endswith("s") else f"{self.what}s"


def at(thing: Answer, path: str) -> Any:
    """``None`` where there is nothing."""
    found: Any = thing
    for key in path.split("."):
        found = found.get(key) if isinstance(found, dict) else None
    return found


def told(thing: Answer, paths: Sequence[str]) -> str:
    """The values of a thing at ``paths``, for people. That all is well goes without saying."""
    words = [str(at(thing, path) or "") for path in paths]
    return ", ".join(word for word in words if word not in ("", "Succeeded"))


def power(instance: Answer) -> str:
    """Such as ``running``; empty while there is no machine yet."""
    for status in at(instance, "properties.instanceView.statuses") or ():
        kind, _, state = status.get("code", "").partition("/")
        if kind == "PowerState":
            return str(state)
    return ""


def instance_usd(instance: Answer, *, spot: bool) -> float | None:
    """A machine's price per hour; the spot price if it is one and that is known. What is stopped goes on to cost,
    unless it is deallocated."""
    if power(instance) == "deallocated":
        return 0.0
    for price in catalog().prices:
        if (price.type, price.region) == (at(instance, "sku.name"), instance["location"]):
            return price.spot if spot and price.spot is not None else price.on_demand
    return None


def _disk_usd(disk: Answer) -> float | None:
    if at(disk, "sku.name") != "Premium_LRS":
        return None
    size = at(disk, "properties.diskSizeGB") or 0
    month = next((usd for gb, usd in PREMIUM_USD_PER_MONTH.items() if size <= gb), None)
    return None if month is None else month / HOURS_A_MONTH


STATE = ("properties.provisioningState",)
ADDRESS = ("properties.ipAddress", *STATE)
KINDS = (
    Kind(
        "scale set",
        "microsoft.compute/virtualmachinescalesets",
        lambda account: account.compute.virtual_machine_scale_sets.list_all(),
        ("sku.name", *STATE),
    ),
    Kind(
        "disk",
        "microsoft.compute/disks",
        lambda account: account.compute.disks.list(),
        ("sku.name", "properties.diskState"),
        _disk_usd,
    ),
    Kind(
        "snapshot",
        "microsoft.compute/snapshots",
        lambda account: account.compute.snapshots.list(),
        ("sku.name",),
        lambda _: None,  # by what is stored, which is not told
    ),
    Kind(
        "public address",
        "microsoft.network/publicipaddresses",
        lambda account: account.network.public_ip_addresses.list_all(),
        ADDRESS,
        lambda _: PUBLIC_ADDRESS_USD_PER_HOUR,
    ),
    Kind(
        "NAT gateway",
        "microsoft.network/natgateways",
        lambda account: account.network.nat_gateways.list_all(),
        STATE,
        lambda _: _NAT_USD_PER_HOUR,
    ),
    Kind(
        "network interface",
        "microsoft.network/networkinterfaces",
        lambda account: account.network.network_interfaces.list_all(),
        STATE,
    ),
    Kind(
        "security group",
        "microsoft.network/networksecuritygroups",
        lambda account: account.network.network_security_groups.list_all(),
        STATE,
    ),
    Kind(
        "virtual network",
        "microsoft.network/virtualnetworks",
        lambda account: account.network.virtual_networks.list_all(),
        STATE,
    ),
)
