"""Deletes what ``leaks`` found, without Pulumi.

A cluster's resource group goes as one, with all in it, since that is how Azure is sure to have forgotten nothing. Its
scale sets go before it, so that machines end while they may still write a last checkpoint, and then its roles, which
may not outlive what they are for. What carries the cluster's tag elsewhere goes by itself.

Each is looked at once more before it goes: what a scan found may be another's by now. A resource group goes only if it
has the cluster's tag and the name that gpuctl gives it, and if all in it is gpuctl's: of a type that the program makes,
tagged, or a disk that Azure made for a scale set. Else gpuctl's own things in it go one by one, and it stays with the
rest. (``gpuctl down`` by Pulumi's state is less careful: Pulumi deletes a group with whatever is in it.) Kept groups,
and what lies in them, are no leftovers; ``kept_buckets`` deletes those.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import cache

from gpuctl.cluster.errors import GpuctlError
from gpuctl.stacks.clouds.answers import Leftover
from gpuctl.stacks.clouds.azure.cleanup.deletions import GROUPS, Deletions, DeletionTarget
from gpuctl.stacks.clouds.azure.client import Answer, AzureAccount, connecting
from gpuctl.stacks.clouds.azure.error_mapping import NotFound
from gpuctl.stacks.clouds.azure.ids import group_of, is_below, is_group, name_of, type_of
from gpuctl.stacks.clouds.azure.ownership import is_kept, tagged, worded

_SCALE_SET = "microsoft.compute/virtualmachinescalesets"
_DISK = "microsoft.compute/disks"
_WORDED = ("microsoft.authorization/roleassignments", "microsoft.authorization/roledefinitions")
_FIRST = (_SCALE_SET, *_WORDED)
"""In this order. Azure deletes no role that somebody has."""
_MADE = (
    _SCALE_SET,
    "microsoft.network/virtualnetworks",
    "microsoft.network/networksecuritygroups",
    "microsoft.managedidentity/userassignedidentities",
)
"""What the program makes in a cluster's resource group."""


def remove(
    leftovers: Sequence[Leftover],
    say: Callable[[str], None],
    account: AzureAccount | None = None,
    pause: Callable[[float], None] = time.sleep,
    now: Callable[[], float] = time.monotonic,
) -> None:
    """Delete what a scan has found; see ``Cloud.remove``.

    Args:
        leftovers: only what has a ``ref``, its resource id, is deleted.
        say: is told what was deleted, and what stays and why.
        account: the subscription to delete in; ``None``: that of the environment.
        pause: see ``Deletions``.
        now: see ``Deletions``.

    Raises ``GpuctlError`` if Azure cannot be asked at all.
    """
    account = account or connecting()
    deletions = Deletions(account, say, pause, now)
    found = [one for one in leftovers if one.ref]
    look = _Look(account, deletions, say)
    whole = [one for one in found if is_group(one.ref) and look.may_go_whole(one)]
    parts = [one for one in found if not is_group(one.ref)]
    sets, assignments, roles = (
        [one for one in parts if type_of(one.ref) == kind and look.is_ours(one)] for kind in _FIRST
    )
    rest = [one for one in parts if type_of(one.ref) not in _FIRST and not _goes_along(one, [*whole, *parts])]
    for stage in (sets, assignments, roles, [*whole, *(one for one in rest if look.is_ours(one))]):
        deletions.run([DeletionTarget(f"{one.kind} {one.id}", one.ref) for one in stage])


def _goes_along(one: Leftover, others: Iterable[Leftover]) -> bool:
    """Whether a resource is deleted with its resource group, or with what it is part of, such as a card with its
    machine."""
    return any(is_below(one.ref, other.ref) for other in others)


class _Look:
    """Looks at resources as they are in Azure now, and decides which of them may go."""

    def __init__(self, account: AzureAccount, deletions: Deletions, say: Callable[[str], None]) -> None:
        self._account = account
        self._deletions = deletions
        self._say = say
        self._group = cache(lambda name: account.got(f"resourcegroups/{name}", GROUPS))

    def may_go_whole(self, group: Leftover) -> bool:
        """Whether a resource group is the cluster's, and all that is in it."""
        try:
            seen = self._group(group.id)
            things = list(self._account.listed(f"{group.ref}/resources", GROUPS))
        except NotFound:
            return False
        except GpuctlError as error:
            return self._stays(group, error.message)
        if not _is_home(seen, group):
            return self._stays(group, f"gpuctl did not create it for {group.cluster}")
        others = [thing for thing in things if not (_is_tagged(thing, group) or _is_made(thing))]
        if others:
            told = ", ".join(sorted(f"{one.get('type', '')} {one['name']}" for one in others))
            how = f"az group delete --name {group.id} deletes that too"
            return self._stays(group, f"gpuctl did not create {told}, which is in it; {how}")
        return True

    def is_ours(self, one: Leftover) -> bool:
        """Whether a resource is the cluster's, by its own tag or words, or as part of the cluster's resource group."""
        try:
            thing = self._account.got(one.ref, self._deletions.version(one.ref))
            if type_of(one.ref) in _WORDED:
                # An assignment without our words goes with what it is for.
                return worded(_words(thing)).is_of(one.cluster, one.cluster_id)
            home = self._group(group_of(one.ref))
        except NotFound:
            return False
        except GpuctlError as error:
            return self._stays(one, error.message)
        if is_kept(home):
            return self._stays(one, "it is in the resource group of a bucket that is kept")
        if _is_tagged(thing, one) or (_is_home(home, one) and not tagged(thing) and _is_made(thing)):
            return True
        return self._stays(one, f"it does not carry the tag of {one.cluster}")

    def _stays(self, one: Leftover, why: str) -> bool:
        self._say(f"{one.kind} {one.id} was not deleted: {why}")
        return False


def _is_home(group: Answer, wanted: Leftover) -> bool:
    """Whether a group is the cluster's own, by tag and by name: others' policies copy tags to their own groups."""
    return group["name"].lower() == f"gpuctl-{wanted.cluster}" and not is_kept(group) and _is_tagged(group, wanted)


def _is_tagged(thing: Answer, wanted: Leftover) -> bool:
    return tagged(thing).is_of(wanted.cluster, wanted.cluster_id)


def _is_made(thing: Answer) -> bool:
    """Whether a resource was made by the program, or by Azure for a scale set: its disks have no tags, but its name,
    which is the group's too."""
    type_, name, group = type_of(thing["id"]), name_of(thing["id"]).lower(), group_of(thing["id"]).lower()
    return type_ in _MADE or (type_ == _DISK and name.startswith(f"{group}_"))


def _words(thing: Answer) -> str:
    said = thing["properties"]
    return str(said.get("roleName") or said.get("description") or "")
