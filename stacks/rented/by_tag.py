"""Taking a cluster away by its tags alone, without anything that this machine would know of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from gpuctl.cluster.errors import GpuctlError
from gpuctl.stacks.clouds import regions
from gpuctl.stacks.clouds.answers import Leftover, Scan
from gpuctl.stacks.clouds.interface import Cloud, cloud
from gpuctl.stacks.clouds.removal_by_tag import removed
from gpuctl.stacks.providers.interface import Dialog
from gpuctl.stacks.rented import cluster_bucket
from gpuctl.stacks.rented.namesakes import refuse_other_account
from gpuctl.stacks.request import last_request
from gpuctl.stacks.state import clusters
from gpuctl.stacks.state.clusters import KnownCluster


def remove_known(there: KnownCluster, dialog: Dialog, *, force: bool) -> list[str]:
    """Remove a cluster whose Pulumi state is elsewhere; returns the names of what is left. ``force``: also without a
    proof."""
    here = cloud(there.provider)
    dialog.say(f"this machine has no usable Pulumi state for {there.name}: removing resources by tag")
    account = here.account(there.region or regions.choose(here.name).name)
    refuse_other_account(there.name, there.account, account)

    def is_its(one: Leftover) -> bool:
        return (one.cluster, one.cluster_id) == (there.name, there.id)

    places = [there.region or "all"]
    found = only(here.leftovers(places, None), is_its)
    if not found.found and not there.account and not force:
        raise GpuctlError(
            f"nothing of {there.name} is in {account}, and its account was not recorded",
            "log in to the account it was created in, or, if that is this one: gpuctl down --force",
        )
    left = remove_found(here, found, places, is_its, dialog) if found.found else unseen(found)
    if not left:
        forget(there)
    return left


def remove_found(
    there: Cloud, found: Scan, places: Sequence[str], fits: Callable[[Leftover], bool], dialog: Dialog
) -> list[str]:
    """Ask, remove what was ``found``, and look again; returns the names of what is left.

    Args:
        there: the cloud.
        found: what is to go.
        places: regions to look into again.
        fits: what of a later scan counts as left.
        dialog: who is asked.
    """
    dialog.confirm_removal(found)

    def again() -> Scan:
        return only(there.leftovers(places, None), fits)

    try:
        last = removed(there, found, dialog.say, again)
    except KeyboardInterrupt:
        dialog.say(f"interrupted; what is left: {again().summary() or 'nothing'}; run the same command again to go on")
        raise
    return [f"{one.kind} {one.id} in {one.region or there.name}" for one in last.found] + unseen(last)


def only(scan: Scan, fits: Callable[[Leftover], bool]) -> Scan:
    """The part of ``scan`` whose resources ``fits`` accepts."""
    return msgspec.structs.replace(scan, found=tuple(one for one in scan.found if fits(one)))


def unseen(scan: Scan) -> list[str]:
    """A line for each thing that could not be looked at."""
    return [f"could not check {line}" for line in scan.unseen]


def forget(there: KnownCluster) -> None:
    """Forget a cluster of which nothing is left; also its record in the bucket, where a later `up` of that name would
    take it for a stranger's."""
    with suppress(GpuctlError):  # the bucket may be gone
        cluster_bucket.forget(there.bucket, there.id)
    last_request.forget_all(there.name)
    clusters.forget(there.name)
