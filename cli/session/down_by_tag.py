"""``gpuctl down`` without anything that this machine would know of a cluster: by its tags alone."""

from __future__ import annotations

from collections.abc import Sequence

from gpuctl.cli.render.dialog import TerminalDialog
from gpuctl.cli.render.terminal import count, out, say
from gpuctl.cli.session.rental_plan import set_regions
from gpuctl.cli.settings.resolve import load
from gpuctl.cli.signals import as_interrupts
from gpuctl.cluster.errors import BadInput, CorruptRecord, GpuctlError
from gpuctl.stacks.catalog.instance_types import CLOUDS
from gpuctl.stacks.clouds import regions
from gpuctl.stacks.clouds.answers import Leftover, Scan
from gpuctl.stacks.clouds.interface import Cloud, cloud
from gpuctl.stacks.clouds.removal_by_tag import blind
from gpuctl.stacks.rented.by_tag import forget, only, remove_found, unseen
from gpuctl.stacks.request import last_request
from gpuctl.stacks.state import clusters


def remove_by_tag(tag: str, provider: str | None, named: Sequence[str], *, yes: bool) -> None:
    """List what carries a tag, ask, delete, and look again.

    Args:
        tag: a cluster's name or id.
        provider: name of the cloud; ``None``: the flag is missing, which is refused.
        named: regions to look into, or ``all``; empty: those of the setting, those used from here, and the usual one.
        yes: whether to delete without asking.

    Raises ``GpuctlError`` if something is left.
    """
    if provider is None:
        raise BadInput("--by-tag needs a cloud", f"add --provider, one of: {', '.join(CLOUDS)}")
    there = cloud(provider)
    places = regions.to_search(there.name, named)
    if not named:
        told = set_regions(load(only=("region",)), there.name)
        places = tuple(dict.fromkeys([*(one.name for one in told), *places]))
        sources = {one.name: f" ({one.source})" for one in told}
        say(f"looking in {', '.join(name + sources.get(name, '') for name in places)}; elsewhere: --region NAME")

    def carries_it(one: Leftover) -> bool:
        return tag in (one.cluster, one.cluster_id)

    found = only(there.leftovers(places, None), carries_it)
    _refuse_several(tag, found)
    if not found.found:
        _refuse_unseen(found)
        say(f"nothing with the tag {tag} on {provider}, in {', '.join(found.regions)}")
        return
    unproven = _refuse_what_runs_elsewhere(there, found, places)

    def may_go(one: Leftover) -> bool:
        return carries_it(one) and bool(one.region or not unproven)

    for why in unproven:
        say(f"global resources are kept, as machines elsewhere may need them: {why}")
    going = only(found, may_go)
    with as_interrupts():
        left = remove_found(there, going, places, may_go, TerminalDialog(yes=yes)) if going.found else []
    left += [f"{one.kind} {one.id}" for one in found.found if not may_go(one)] + unproven
    if left:
        for thing in left:
            out(f"left: {thing}")
        raise GpuctlError(f"{count(len(left), 'thing')} could not be removed", "repeat it")
    _forget_known(found, places)
    out(f"nothing of {tag} is left on {provider}, in {', '.join(found.regions)}")


def _refuse_what_runs_elsewhere(there: Cloud, found: Scan, places: Sequence[str]) -> list[str]:
    """Roles are in no region: machines of the same cluster in one that was not looked into could not go on without
    them. Raises ``BadInput`` if there are such. Returns what keeps that from being known."""
    shared = {(one.cluster, one.cluster_id) for one in found.found if not one.region}
    if not shared or "all" in places:
        return []
    say("looking in all regions for machines that need its roles")
    try:
        everywhere = there.leftovers(["all"], None)
    except GpuctlError as error:
        return [f"could not check other regions: {error.message}"]
    elsewhere = sorted(
        {
            one.region
            for one in everywhere.found
            if one.region and one.region not in found.regions and (one.cluster, one.cluster_id) in shared
        }
    )
    if elsewhere:
        more = " ".join(f"--region {name}" for name in [*found.regions, *elsewhere])
        raise BadInput(f"the cluster also has resources in {', '.join(elsewhere)}", f"add {more}, or --region all")
    return [why] if (why := blind(everywhere)) else []


def _refuse_several(tag: str, scan: Scan) -> None:
    """Two clusters of one name: nobody means both."""
    owners = {one.cluster_id: one for one in scan.found if one.cluster == tag}
    if len(owners) > 1:
        told = ", ".join(
            f"{one.cluster_id or 'one without an id'} of {one.owner or 'somebody'} ({one.created or 'no date'})"
            for one in owners.values()
        )
        raise BadInput(f"there are {len(owners)} clusters named {tag}: {told}", "name one by its id: --by-tag ID")


def _refuse_unseen(scan: Scan) -> None:
    if lines := unseen(scan):
        raise GpuctlError(lines[0], "this list may be incomplete")


def _forget_known(found: Scan, places: Sequence[str]) -> None:
    """Forget the clusters found that this machine knows, if they are the same, and where it knows them to be was looked
    into."""
    for one in {each.cluster: each for each in found.found}.values():
        _forget_unreadable(one.cluster)
        there = last_request.recalled(one.cluster)
        was_looked_into = there is not None and ("all" in places or there.region in found.regions)
        if there is not None and there.id == one.cluster_id and was_looked_into:
            forget(there)


def _forget_unreadable(name: str) -> None:
    """Records of that name that nobody can use any more: they would be in the way of a new cluster's."""
    try:
        last_request.recalled(name)
    except CorruptRecord as error:
        say(f"{error.message}: deleted")
        last_request.forget_all(name)
        clusters.forget(name)
