"""What is there of our clusters, found by asking Google kind by kind, whatever Pulumi's state knows of it.

Machines, disks, addresses, forwarding rules and templates have our labels. What takes none is known by the name or the
words that ``network``, ``group`` and ``identity`` give it, or by standing in a cluster's network: those keep it from
being deleted, whoever made them. The bucket is not among it: it is kept on purpose.

Compute Engine tells of all zones and regions in one answer, so a scan of everything costs no more than of one region.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from gpuctl.cluster.errors import BadInput, GpuctlError
from gpuctl.stacks.cloud import Leftover, Scan
from gpuctl.stacks.gcp import PUBLIC_ADDRESS_USD_PER_HOUR, shape
from gpuctl.stacks.gcp.account import Account, entering, last, usual_region
from gpuctl.stacks.machines import catalog

LABEL = "gpuctl-cluster"
NAMED = re.compile(r"gpuctl-([a-z][a-z0-9-]*)")
"""Networks, groups and their placement: names that begin so are ours."""
SERVICE_ACCOUNT = re.compile(r"nodes of the gpuctl cluster (\S+)")
"""What is shown of it: a long cluster's name is cut off in its own."""
ROLE = re.compile(r"leave the group of the gpuctl cluster (\S+)")
ROLE_ID = re.compile(r"projects/[^/]+/roles/gpuctl_([a-z0-9_]+?)(?:_\d{4}_\d\d_\d\d)?")
"""Its day is not the cluster's name."""
TAG_KEY = re.compile(r"marks what belongs to the gpuctl cluster (\S+)")
_ALL = "all"
_AT_ONCE = 8
_HOURS_OF_A_MONTH = 730
_DISK_USD_PER_GB_MONTH = {"pd-standard": 0.04, "pd-balanced": 0.10, "pd-ssd": 0.17}
"""us-central1, not looked up: see cloud.google.com/compute/disks-image-pricing."""
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
    owner: Callable[[Any], str]
    """Name of its cluster; empty: it is none of ours."""
    about: Callable[[Any], Sequence[str]] = lambda _: ()
    usd: Callable[[Any, str], float | None] = lambda _thing, _region: 0.0
    """For an hour, in a region."""
    labelled: bool = False
    """Google can be asked for those with our label alone."""


def scan(regions: Sequence[str], cluster: str | None = None, account: Account | None = None) -> Scan:
    """See ``cloud.Cloud``. Where no region is named, by the environment neither, it looks everywhere. What is
    in no region is always looked at; what Google refuses to show is told in ``unseen``."""
    account = (account or entering()).log_in()
    places = _places(regions, account)
    looks: list[tuple[str, Callable[[], Iterator[Leftover]]]] = [
        (f"{kind.what}s", partial(_found, kind, account, cluster)) for kind in KINDS
    ]
    looks += [
        ("service accounts", partial(_service_accounts, account)),
        ("roles", partial(_roles, account)),
        ("role bindings", partial(_bindings, account)),
        ("tags", partial(_tags, account)),
    ]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        seen = list(pool.map(_seen, looks))
    found = [one for part, _ in seen for one in part if cluster in (None, one.cluster)]
    return Scan(
        regions=places,
        found=tuple(sorted((one for one in found if one.region in ("", *places)), key=_order)),
        unseen=tuple(why for _, why in seen if why),
    )


def _seen(look: tuple[str, Callable[[], Iterator[Leftover]]]) -> tuple[list[Leftover], str]:
    """What was found, and why there may be more."""
    what, find = look
    found: list[Leftover] = []
    try:
        found.extend(find())
    except GpuctlError as error:
        return found, f"{what}: {error.message}"
    return found, ""


def _order(one: Leftover) -> tuple[str, float, str, str, str]:
    usd = math.inf if one.usd_per_hour is None else one.usd_per_hour
    return one.cluster, -usd, one.kind, one.region, one.id


def _places(regions: Sequence[str], account: Account) -> tuple[str, ...]:
    """Raises ``BadInput`` for one that is none: nothing would be found there, which proves nothing."""
    known = tuple(sorted(region.name for region in account.listed("Regions")))
    usual = usual_region()
    wanted = tuple(dict.fromkeys(regions)) or ((usual,) if usual else (_ALL,))
    if _ALL in wanted:
        return known
    if unknown := [region for region in wanted if region not in known]:
        raise BadInput(f"{unknown[0]!r} is no region of Google Cloud", f"use all, or some of: {', '.join(known)}")
    return wanted


# -- Compute Engine ---------------------------------------------------------------------------------------------------


def _found(kind: Kind, account: Account, cluster: str | None) -> Iterator[Leftover]:
    asked = {"filter": f"labels.{LABEL}={cluster}" if cluster else f"labels.{LABEL}:*"} if kind.labelled else {}
    things = (
        account.everywhere(kind.client, kind.field, **asked)
        if kind.field
        else (("global", thing) for thing in account.listed(kind.client, **asked))
    )
    for scope, thing in things:
        owner = kind.owner(thing)
        if not owner:
            continue
        region, zone = _region(scope), last(scope) if scope.startswith("zones/") else ""
        yield Leftover(
            cluster=owner,
            kind=kind.what,
            id=thing.name,
            region=region,
            about=", ".join(word for word in (*kind.about(thing), zone) if word),
            usd_per_hour=kind.usd(thing, region),
        )


def _region(scope: str) -> str:
    """Of ``zones/us-central1-a`` or ``regions/us-central1``; empty for ``global``."""
    kind, _, name = scope.partition("/")
    return name.rpartition("-")[0] if kind == "zones" else name


def _by_label(thing: Any) -> str:
    return str(thing.labels.get(LABEL, ""))


def _by_label_or_network(thing: Any) -> str:
    return _by_label(thing) or _by_network(thing)


def _by_name(thing: Any) -> str:
    named = NAMED.fullmatch(thing.name)
    return named[1] if named else ""


def _by_network(thing: Any) -> str:
    named = NAMED.fullmatch(last(thing.network))
    return named[1] if named else ""


def _of_template(thing: Any) -> str:
    return str(thing.properties.labels.get(LABEL, ""))


def _is_spot(thing: Any) -> bool:
    return bool(thing.scheduling.provisioning_model == "SPOT")


def _instance_usd(thing: Any, region: str) -> float | None:
    """As spot, if it is one and that price is known."""
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
    rate = _DISK_USD_PER_GB_MONTH.get(last(thing.type_))
    copies = len(thing.replica_zones) or 1
    return None if rate is None else rate * thing.size_gb * copies / _HOURS_OF_A_MONTH


def _address_usd(thing: Any, _: str) -> float:
    if thing.address_type == "INTERNAL":
        return 0.0
    return PUBLIC_ADDRESS_USD_PER_HOUR if thing.users else _IDLE_ADDRESS_USD_PER_HOUR


def _router_usd(thing: Any, _: str) -> float | None:
    """NAT is paid for by the machine and by the GB."""
    return None if thing.nats else 0.0


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
    Kind("firewall rule", "Firewalls", "", _by_network, lambda one: (one.description,)),
    Kind("subnet", "Subnetworks", "subnetworks", _by_network, lambda one: (one.ip_cidr_range,)),
    Kind("network", "Networks", "", _by_name),
)

# -- what is in no place ----------------------------------------------------------------------------------------------


def _service_accounts(account: Account) -> Iterator[Leftover]:
    for page in account.pages("iam", f"v1/projects/{account.project}/serviceAccounts", pageSize=100):
        for one in page.get("accounts", ()):
            if owner := SERVICE_ACCOUNT.fullmatch(one.get("displayName", "")):
                yield Leftover(cluster=owner[1], kind="service account", id=one["email"], region="")


def _roles(account: Account) -> Iterator[Leftover]:
    for page in account.pages("iam", f"v1/projects/{account.project}/roles", pageSize=300):
        for role in page.get("roles", ()):
            owner = ROLE.fullmatch(role.get("title", ""))
            if owner and not role.get("deleted"):
                yield Leftover(cluster=owner[1], kind="role", id=role["name"], region="")


def _bindings(account: Account) -> Iterator[Leftover]:
    """Who has a role of ours; it may have outlived the role, and the account too."""
    asked = {"options": {"requestedPolicyVersion": 3}}  # else those with a condition are left out
    policy = account.ask("cloudresourcemanager", f"v1/projects/{account.project}:getIamPolicy", asked)
    for binding in policy.get("bindings", ()):
        if owner := ROLE_ID.fullmatch(binding["role"]):
            for member in binding.get("members", ()):
                yield Leftover(
                    cluster=owner[1].replace("_", "-"),
                    kind="role binding",
                    id=f"{last(binding['role'])} of {member}",
                    region="",
                )


def _tags(account: Account) -> Iterator[Leftover]:
    for page in account.pages("cloudresourcemanager", "v3/tagKeys", parent=f"projects/{account.project}", pageSize=300):
        for key in page.get("tagKeys", ()):
            if owner := TAG_KEY.fullmatch(key.get("description", "")):
                yield _tag("tag key", key, owner[1])
                yield from _tag_values(account, key["name"], owner[1])


def _tag_values(account: Account, key: str, owner: str) -> Iterator[Leftover]:
    for page in account.pages("cloudresourcemanager", "v3/tagValues", parent=key, pageSize=300):
        for value in page.get("tagValues", ()):
            yield _tag("tag value", value, owner)


def _tag(kind: str, tag: dict[str, Any], owner: str) -> Leftover:
    return Leftover(cluster=owner, kind=kind, id=tag["name"], region="", about=tag.get("namespacedName", ""))
