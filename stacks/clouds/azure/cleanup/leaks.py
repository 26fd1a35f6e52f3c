"""Resources of our clusters, found by asking Azure, whatever Pulumi's state knows of them.

What proves a cluster gone is that its resource group is: Azure ends a group only after all that is in it, of kinds
that nobody here has thought of too. So the resource manager's lists come first, of groups and of all resources, and
what is in a cluster's group is the cluster's, with a tag or without. They are asked for whole: where Azure is asked to
filter by a tag, it leaves the tags out of its answer.

Those lists lag by minutes, and tell no sizes and no states. So most kinds are asked of their own provider too, whose
word goes before, and scale sets for their machines, which are on no other list. Roles have neither tags nor groups:
ours say in words whose they are (see ``azure.of_cluster``).

The group that ``down`` keeps, with the storage account in it, is not among them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from typing import Any

from gpuctl.cluster.errors import GpuctlError
from gpuctl.stacks.clouds.answers import Leftover, Scan
from gpuctl.stacks.clouds.azure import PUBLIC_ADDRESS_USD_PER_HOUR
from gpuctl.stacks.clouds.azure.cleanup.leak_kinds import ADDRESS, FREE, KINDS, STATE, at, instance_usd, power, told
from gpuctl.stacks.clouds.azure.client import Answer, AzureAccount, connecting, who
from gpuctl.stacks.clouds.azure.error_mapping import NotFound, Unregistered, understood
from gpuctl.stacks.clouds.azure.ids import group_of, short, type_of
from gpuctl.stacks.clouds.azure.ownership import Owner, Owners, region_of
from gpuctl.stacks.clouds.azure.preflight.permissions import may, rights
from gpuctl.stacks.clouds.azure.regions import places_of

_AT_ONCE = 8
_RESOURCES, _ROLES = "2021-04-01", "2022-04-01"
"""Versions of the API."""
_READ_ALL = "Microsoft.Resources/subscriptions/resources/read"


Look = tuple[str, Callable[[], Iterable[Any]]]
"""What is looked for, in the words of a complaint, and the call that lists it."""
Seen = dict[str, list[Answer]]
"""What was listed; nothing where that was refused."""


def scan(regions: Sequence[str], cluster: str | None = None, account: AzureAccount | None = None) -> Scan:
    """See ``Cloud``; Azure's lists are of all regions, so no region is all of them. What Azure refuses
    to show is told in ``unseen``. Raises ``BadInput`` for a region that is none."""
    account = account or connecting()
    who(account)
    places = places_of(account, regions)
    seen, unseen = _looked([*_lists(account), *((kind.many, partial(kind.things, account)) for kind in KINDS)])
    owners = Owners(seen.get("resource groups", []))
    found = list(chain(_groups(owners), _provided(owners, seen), _rest(owners, seen), _roles(owners, seen)))
    for scale_set in seen.get("scale sets", ()):
        if owner := owners.of(scale_set):
            machines, more = _looked(_parts_of(scale_set, account))
            found += _machines(scale_set, machines, owner)
            unseen += more
    if "rights" in seen and not may(_READ_ALL, seen["rights"]):
        unseen.append("resources made by others: these Azure credentials may read only parts of the subscription")
    return Scan(
        regions=places or ("all regions",),
        found=tuple(
            one
            for one in sorted(found, key=_order)
            if cluster in (None, one.cluster) and (not places or one.region in ("", *places))
        ),
        unseen=tuple(unseen),
    )


def _order(one: Leftover) -> tuple[str, float, str, str, str]:
    usd = math.inf if one.usd_per_hour is None else one.usd_per_hour
    return one.cluster, -usd, one.kind, one.region, one.id


# -- looking ----------------------------------------------------------------------------------------------------------


def _lists(account: AzureAccount) -> list[Look]:
    """The lists of the resource manager."""
    roles = "providers/Microsoft.Authorization"
    below = {"$filter": "atScopeAndBelow()"}
    return [
        ("resource groups", lambda: account.listed("resourcegroups", _RESOURCES)),
        ("resources", lambda: account.listed("resources", _RESOURCES)),
        ("roles", lambda: account.listed(f"{roles}/roleDefinitions", _ROLES, **below)),
        ("role assignments", lambda: account.listed(f"{roles}/roleAssignments", _ROLES)),
        ("rights", lambda: rights(account)),
    ]


def _parts_of(scale_set: Answer, account: AzureAccount) -> list[Look]:
    """The parts of a scale set, which no list of a subscription has."""
    where = group_of(scale_set["id"]), scale_set["name"]
    machines, network = account.compute.virtual_machine_scale_set_vms, account.network
    name = f"{where[0]}/{where[1]}"
    return [
        (f"instances of {name}", lambda: machines.list(*where, expand="instanceView")),
        (
            f"network interfaces of {name}",
            lambda: network.network_interfaces.list_virtual_machine_scale_set_network_interfaces(*where),
        ),
        (
            f"public addresses of {name}",
            lambda: network.public_ip_addresses.list_virtual_machine_scale_set_public_ip_addresses(*where),
        ),
    ]


def _looked(looks: Sequence[Look]) -> tuple[Seen, list[str]]:
    """The things that were found, and a line for each look that failed."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        answers = list(zip(looks, pool.map(_seen, looks), strict=True))
    seen = {what: answer for (what, _), answer in answers if not isinstance(answer, str)}
    return seen, [f"{what}: {answer}" for (what, _), answer in answers if isinstance(answer, str)]


def _seen(look: Look) -> list[Answer] | str:
    _, things = look
    try:
        with understood():
            return [one if isinstance(one, dict) else one.as_dict() for one in things()]
    except (NotFound, Unregistered):
        return []
    except GpuctlError as error:
        return error.message


# -- what it is -------------------------------------------------------------------------------------------------------


def _groups(owners: Owners) -> Iterator[Leftover]:
    for group, owner in owners.groups():
        yield _leftover("resource group", group, owner, about=told(group, STATE))


def _provided(owners: Owners, seen: Seen) -> Iterator[Leftover]:
    for kind in KINDS:
        for thing in seen.get(kind.many, ()):
            if owner := owners.of(thing):
                yield _leftover(kind.what, thing, owner, kind.usd(thing), told(thing, kind.about))


def _rest(owners: Owners, seen: Seen) -> Iterator[Leftover]:
    """Leftovers that only the resource manager has told of: kinds that nobody asks for by themselves, or may not. Its
    list goes on to tell of what was in a group that has ended; that of groups does not lag."""
    groups = seen.get("resource groups", seen.get("resources", ()))
    there = {group_of(one["id"]).lower() for one in groups}
    words = {kind.type: kind.what for kind in KINDS}
    asked = {kind.type for kind in KINDS if kind.many in seen}
    for thing in seen.get("resources", ()):
        type_ = type_of(thing["id"])
        if type_ not in asked and group_of(thing["id"]).lower() in there and (owner := owners.of(thing)):
            what = FREE.get(type_) or words.get(type_) or thing.get("type", type_)
            yield _leftover(what, thing, owner, 0.0 if type_ in FREE else None)


def _roles(owners: Owners, seen: Seen) -> Iterator[Leftover]:
    """Those at the scope of something kept, and without our words, are kept with it."""
    for role in seen.get("roles", ()):
        name = role["properties"]["roleName"]
        if owner := owners.of_words(name):
            yield _of("role", role["name"], role, owner, about=name)
    for given in seen.get("role assignments", ()):
        said = given["properties"]
        if owner := owners.of_words(said.get("description") or "") or owners.of_scope(said["scope"]):
            yield _of("role assignment", given["name"], given, owner, about=short(said["scope"]))


def _machines(scale_set: Answer, seen: Seen, owner: Owner) -> Iterator[Leftover]:
    """Each with its network cards and addresses."""
    spot = at(scale_set, "properties.virtualMachineProfile.priority") == "Spot"
    region = scale_set["location"]
    for what, things in seen.items():
        for thing in things:
            placed = {"location": region, **thing}
            if what.startswith("instances"):
                usd = instance_usd(placed, spot=spot)
                about = ", ".join(
                    word for word in (at(thing, "sku.name"), power(thing), "spot" if spot else "") if word
                )
                yield _leftover("instance", placed, owner, usd, about)
            elif what.startswith("public"):
                yield _leftover("public address", placed, owner, PUBLIC_ADDRESS_USD_PER_HOUR, told(thing, ADDRESS))
            else:
                yield _leftover("network interface", placed, owner)


def _leftover(what: str, thing: Answer, owner: Owner, usd: float | None = 0.0, about: str = "") -> Leftover:
    return _of(what, short(thing["id"]), thing, owner, usd, about)


def _of(what: str, id_: str, thing: Answer, owner: Owner, usd: float | None = 0.0, about: str = "") -> Leftover:
    return Leftover(
        cluster=owner.cluster,
        kind=what,
        id=id_,
        region=region_of(thing),
        about=about,
        usd_per_hour=usd,
        cluster_id=owner.id,
        owner=owner.owner,
        created=owner.created,
        ref=thing["id"],
    )
