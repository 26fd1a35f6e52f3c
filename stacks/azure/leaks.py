"""What is there of our clusters, found by asking Azure, whatever Pulumi's state knows of it.

What proves a cluster gone is that its resource group is: Azure ends a group only after all that is in it, of kinds
that nobody here has thought of too. So the resource manager's lists come first, of groups and of all resources, and
what is in a cluster's group is the cluster's, with a tag or without. They are asked for whole: where Azure is asked to
filter by a tag, it leaves the tags out of its answer.

Those lists lag by minutes, and tell no sizes and no states. So most kinds are asked of their own provider too, whose
word goes before, and scale sets for their machines, which are on no other list. Roles have neither tags nor groups:
ours say in words whose they are (see ``azure.of_cluster``).

The group that ``down`` keeps, with the storage account in it, is not among it.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from typing import Any

from gpuctl.cluster.errors import BadInput, GpuctlError
from gpuctl.stacks.azure import PUBLIC_ADDRESS_USD_PER_HOUR, kept_group, whose
from gpuctl.stacks.azure.account import Account, Answer, Gone, Unregistered, connecting, understood, who
from gpuctl.stacks.azure.kinds import ADDRESS, FREE, KINDS, STATE, at, instance_usd, power, told
from gpuctl.stacks.azure.rights import may, rights
from gpuctl.stacks.cloud import Leftover, Scan

_TAG = "gpuctl:cluster"
_ALL = "all"
_AT_ONCE = 8
_RESOURCES, _LOCATIONS, _ROLES = "2021-04-01", "2022-12-01", "2022-04-01"
"""Versions of the API."""
_READ_ALL = "Microsoft.Resources/subscriptions/resources/read"
_STORAGE = "microsoft.storage/storageaccounts"


Look = tuple[str, Callable[[], Iterable[Any]]]
"""What is looked for, in the words of a complaint, and the call that lists it."""
Seen = dict[str, list[Answer]]
"""What was listed; nothing where that was refused."""


def scan(regions: Sequence[str], cluster: str | None = None, account: Account | None = None) -> Scan:
    """See ``cloud.Cloud``; Azure's lists are of all regions, so no region is all of them. What Azure refuses
    to show is told in ``unseen``. Raises ``BadInput`` for a region that is none."""
    account = account or connecting()
    who(account)
    places = _places(account, regions)
    seen, unseen = _looked([*_lists(account), *((kind.many, partial(kind.things, account)) for kind in KINDS)])
    owners = _Owners(seen.get("resource groups", []))
    found = list(chain(owners.groups(), _provided(owners, seen), _rest(owners, seen), _roles(owners, seen)))
    for scale_set in seen.get("scale sets", ()):
        if owner := owners.of(scale_set):
            machines, more = _looked(_parts_of(scale_set, account))
            found += _machines(scale_set, machines, owner)
            unseen += more
    if "rights" in seen and not may(_READ_ALL, seen["rights"]):
        unseen.append("what others made: these Azure credentials may read only parts of the subscription")
    return Scan(
        regions=places or ("all regions",),
        found=tuple(
            one
            for one in sorted(found, key=_order)
            if cluster in (None, one.cluster) and (not places or one.region in ("", *places))
        ),
        unseen=tuple(unseen),
    )


def _places(account: Account, regions: Sequence[str]) -> tuple[str, ...]:
    """Nothing is ever left in a region that is spelled wrong."""
    if not regions or _ALL in regions:
        return ()
    known = {one["name"] for one in account.listed("locations", _LOCATIONS)}
    for region in regions:
        if region not in known:
            near = difflib.get_close_matches(region, known, 3)
            raise BadInput(f"Azure has no region {region!r}", f"did you mean {', '.join(near)}?" if near else "")
    return tuple(dict.fromkeys(regions))


def _order(one: Leftover) -> tuple[str, float, str, str, str]:
    usd = math.inf if one.usd_per_hour is None else one.usd_per_hour
    return one.cluster, -usd, one.kind, one.region, one.id


# -- looking ----------------------------------------------------------------------------------------------------------


def _lists(account: Account) -> list[Look]:
    """Of the resource manager."""
    roles = "providers/Microsoft.Authorization"
    below = {"$filter": "atScopeAndBelow()"}
    return [
        ("resource groups", lambda: account.listed("resourcegroups", _RESOURCES)),
        ("resources", lambda: account.listed("resources", _RESOURCES)),
        ("roles", lambda: account.listed(f"{roles}/roleDefinitions", _ROLES, **below)),
        ("role assignments", lambda: account.listed(f"{roles}/roleAssignments", _ROLES)),
        ("rights", lambda: rights(account)),
    ]


def _parts_of(scale_set: Answer, account: Account) -> list[Look]:
    """Of a scale set, which no list of a subscription has."""
    where = _group(scale_set), scale_set["name"]
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
    """What was found, and a line for each that nobody can tell."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        answers = list(zip(looks, pool.map(_seen, looks), strict=True))
    seen = {what: answer for (what, _), answer in answers if not isinstance(answer, str)}
    return seen, [f"{what}: {answer}" for (what, _), answer in answers if isinstance(answer, str)]


def _seen(look: Look) -> list[Answer] | str:
    _, things = look
    try:
        with understood():
            return [one if isinstance(one, dict) else one.as_dict() for one in things()]
    except (Gone, Unregistered):
        return []
    except GpuctlError as error:
        return error.message


# -- whose it is ------------------------------------------------------------------------------------------------------


class _Owners:
    """Whose a thing is: its tag says so, or else its resource group's."""

    def __init__(self, groups: Sequence[Answer]) -> None:
        self._clusters = {
            group["name"].lower(): group
            for group in groups
            if group["name"].lower() != kept_group(_tag(group), _region(group))
        }

    def groups(self) -> Iterator[Leftover]:
        for group in self._clusters.values():
            if owner := _tag(group):
                yield _leftover("resource group", group, owner, about=told(group, STATE))

    def of(self, thing: Answer) -> str:
        """Empty: nobody's of ours, or kept. In the group that is kept, what others have put there is theirs."""
        owner = _tag(thing)
        if _type(thing) == _STORAGE and _group(thing).lower() == kept_group(owner, _region(thing)):
            return ""
        return owner or self.of_scope(thing["id"])

    def of_scope(self, id_: str) -> str:
        group = self._clusters.get(_group({"id": id_}).lower())
        return _tag(group) if group else ""


def _tag(thing: Answer) -> str:
    return str((thing.get("tags") or {}).get(_TAG, ""))


def _region(thing: Answer) -> str:
    """``East US`` is ``eastus``; empty: in none."""
    return str(thing.get("location") or "").replace(" ", "").lower()


def _parts(id_: str) -> list[str]:
    return id_.strip("/").split("/")


def _group(thing: Answer) -> str:
    """Of ``/subscriptions/…/resourceGroups/NAME/providers/…``."""
    parts = _parts(thing["id"])
    return parts[3] if len(parts) > 3 and parts[2].lower() == "resourcegroups" else ""


def _type(thing: Answer) -> str:
    """In small letters, by its id: not every list tells it in the same way."""
    _, _, tail = thing["id"].rpartition("/providers/")
    provider, *pairs = tail.lower().split("/")
    return "/".join([provider, *pairs[::2]])


def _short(id_: str) -> str:
    """``GROUP/NAME``, as ``az`` asks for them; what is part of another has that one's name before its own. Azure writes
    some groups in capitals, and takes either."""
    parts = _parts(id_)
    if len(parts) <= 4:
        return parts[-1]
    _, _, tail = id_.rpartition("/providers/")
    return "/".join([_group({"id": id_}).lower(), *tail.split("/")[2::2]])


# -- what it is -------------------------------------------------------------------------------------------------------


def _provided(owners: _Owners, seen: Seen) -> Iterator[Leftover]:
    for kind in KINDS:
        for thing in seen.get(kind.many, ()):
            if owner := owners.of(thing):
                yield _leftover(kind.what, thing, owner, kind.usd(thing), told(thing, kind.about))


def _rest(owners: _Owners, seen: Seen) -> Iterator[Leftover]:
    """What only the resource manager has told of: kinds that nobody asks for by themselves, or may not. Its list goes
    on to tell of what was in a group that has ended; that of groups does not lag."""
    groups = seen.get("resource groups", seen.get("resources", ()))
    there = {_group(one).lower() for one in groups}
    words = {kind.type: kind.what for kind in KINDS}
    asked = {kind.type for kind in KINDS if kind.many in seen}
    for thing in seen.get("resources", ()):
        type_ = _type(thing)
        if type_ not in asked and _group(thing).lower() in there and (owner := owners.of(thing)):
            what = FREE.get(type_) or words.get(type_) or thing.get("type", type_)
            yield _leftover(what, thing, owner, 0.0 if type_ in FREE else None)


def _roles(owners: _Owners, seen: Seen) -> Iterator[Leftover]:
    for role in seen.get("roles", ()):
        name = role["properties"]["roleName"]
        if owner := whose(name):
            yield Leftover(cluster=owner, kind="role", id=role["name"], region="", about=name)
    for given in seen.get("role assignments", ()):
        said = given["properties"]
        if owner := whose(said.get("description") or "") or owners.of_scope(said["scope"]):
            about = _short(said["scope"])
            yield Leftover(cluster=owner, kind="role assignment", id=given["name"], region="", about=about)


def _machines(scale_set: Answer, seen: Seen, owner: str) -> Iterator[Leftover]:
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


def _leftover(what: str, thing: Answer, owner: str, usd: float | None = 0.0, about: str = "") -> Leftover:
    return Leftover(
        cluster=owner, kind=what, id=_short(thing["id"]), region=_region(thing), about=about, usd_per_hour=usd
    )
