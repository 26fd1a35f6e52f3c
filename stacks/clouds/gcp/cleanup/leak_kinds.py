"""The kinds of things that Compute Engine lists: whose one is, what there is to say of it, what it costs.

Machines, disks, addresses, forwarding rules and templates have our labels. What takes none is known by its name, or by
standing in a cluster's network: what does keeps that from being deleted, whoever made it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gpuctl.stacks.catalog.instance_types import catalog
from gpuctl.stacks.clouds.gcp import DISK_USD_PER_GB_MONTH, PUBLIC_ADDRESS_USD_PER_HOUR, shape
from gpuctl.stacks.clouds.gcp.client import last
from gpuctl.stacks.clouds.gcp.ownership import OwnershipLabels, by_labels, by_name, by_words
from gpuctl.stacks.clouds.interface import HOURS_A_MONTH

_IDLE_ADDRESS_USD_PER_HOUR = 0.01
"""Reserved, and of no use to any machine: cloud.google.com/vpc/network-pricing."""
_FORWARDING_USD_PER_HOUR = 0.025
"""For the first five rules together: cloud.google.com/vpc/network-pricing."""
_PAID_FOR = ("PROVISIONING", "STAGING", "RUNNING", "REPAIRING")


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of thing that Compute Engine lists, with what is looked at of each."""

    what: str
    client: str
    field: str
    """Where an answer of all places has it; empty: it is in no place, and there is a plain list."""
    mark: Callable[[Any], OwnershipLabels | None]
    """``None``: it is none of ours."""
    about: Callable[[Any], Sequence[str]] = lambda _: ()
    usd: Callable[[Any, str], float | None] = lambda _thing, _region: 0.0
    """For an hour, in a region."""
    labelled: bool = False
    """Google can be asked for those with our label alone."""

    @property
    def collection(self) -> str:
        """The collection's name in a URL, such as ``instanceGroupManagers``."""
        return f"{self.client[0].lower()}{self.client[1:]}"


def _by_label(thing: Any) -> OwnershipLabels | None:
    return by_labels(thing.labels)


def _by_label_or_network(thing: Any) -> OwnershipLabels | None:
    return _by_label(thing) or _by_network(thing)


def _by_name(thing: Any) -> OwnershipLabels | None:
    return by_name(thing.name, thing.description)


def _by_network(thing: Any) -> OwnershipLabels | None:
    return by_name(last(thing.network), thing.description)


def _of_template(thing: Any) -> OwnershipLabels | None:
    return by_labels(thing.properties.labels)


def _is_spot(thing: Any) -> bool:
    return bool(thing.scheduling.provisioning_model == "SPOT")


def _instance_usd(thing: Any, region: str) -> float | None:
    """A machine's price per hour; the spot price if it is one and that is known."""
    if thing.status not in _PAID_FOR:
        return 0.0
    name = _catalog_name(thing)
    for price in catalog().prices:
        if (price.type, price.region) == (name, region):
            spot = price.spot if _is_spot(thing) else None
            return price.on_demand if spot is None else spot
    return None


def _catalog_name(thing: Any) -> str:
    """Its machine type's, with what was hung on it where it brings no GPUs of its own."""
    hung_on = [(last(one.accelerator_type), one.accelerator_count) for one in thing.guest_accelerators]
    for machine in catalog().types:
        if machine.provider == "gcp":
            name, accelerator = shape(machine)
            if name == last(thing.machine_type) and (accelerator is None or accelerator in hung_on):
                return machine.name
    return ""


def _disk_usd(thing: Any, _: str) -> float | None:
    rate = DISK_USD_PER_GB_MONTH.get(last(thing.type_))
    copies = len(thing.replica_zones) or 1
    return None if rate is None else rate * thing.size_gb * copies / HOURS_A_MONTH


def _address_usd(thing: Any, _: str) -> float:
    if thing.address_type == "INTERNAL":
        return 0.0
    return PUBLIC_ADDRESS_USD_PER_HOUR if thing.users else _IDLE_ADDRESS_USD_PER_HOUR


def _router_usd(thing: Any, _: str) -> float | None:
    """NAT is paid for by the machine and by the GB."""
    return None if thing.nats else 0.0


def _of_whom(thing: Any) -> str:
    """The description of a thing, without what stands in the columns beside it."""
    said = str(thing.description)
    return said.partition(" of the gpuctl cluster ")[0] if by_words(said) else said


KINDS = (
    Kind(
        "instance",
        "Instances",
        "instances",
        _by_label,
        lambda one: (last(one.machine_type), one.status.lower(), "spot" if _is_spot(one) else ""),
        _instance_usd,
        labelled=True,
    ),
    Kind(
        "disk",
        "Disks",
        "disks",
        _by_label,
        lambda one: (f"{one.size_gb} GB {last(one.type_)}", "" if one.users else "used by none"),
        _disk_usd,
        labelled=True,
    ),
    Kind("address", "Addresses", "addresses", _by_label_or_network, lambda one: (one.address,), _address_usd),
    Kind(
        "forwarding rule",
        "ForwardingRules",
        "forwarding_rules",
        _by_label_or_network,
        usd=lambda _thing, _region: _FORWARDING_USD_PER_HOUR,
    ),
    Kind("instance template", "InstanceTemplates", "instance_templates", _of_template),
    Kind(
        "instance group",
        "InstanceGroupManagers",
        "instance_group_managers",
        _by_name,
        lambda one: (f"{one.target_size} wanted",),
    ),
    Kind("placement policy", "ResourcePolicies", "resource_policies", _by_name),
    Kind(
        "router",
        "Routers",
        "routers",
        _by_network,
        lambda one: tuple(f"NAT {nat.name}" for nat in one.nats),
        _router_usd,
    ),
    Kind("firewall rule", "Firewalls", "", _by_network, lambda one: (_of_whom(one),)),
    Kind("subnet", "Subnetworks", "subnetworks", _by_network, lambda one: (one.ip_cidr_range,)),
    Kind("network", "Networks", "", _by_name),
)
