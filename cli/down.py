"""``gpuctl down``"""

from __future__ import annotations

import time
from typing import Annotated

import typer

from gpuctl.cli.access import Access, reach
from gpuctl.cli.options import Cluster, text_option
from gpuctl.cli.terminal import confirm, count, out, say, size
from gpuctl.cluster import jobs, status
from gpuctl.cluster.bucket import Bucket
from gpuctl.cluster.errors import BadInput, GpuctlError, StoreError, StoreUnavailable
from gpuctl.cluster.refusals import shown
from gpuctl.stacks.machines import CLOUDS

_DRAIN_S = 120.0
"""For a last checkpoint of a job, where there is a node to write it."""


def verb(
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask about unfinished jobs.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Clear a crashed update's lock; forget own machines that are gone for good.")
    ] = False,
    delete_checkpoints: Annotated[
        str | None,
        text_option("--delete-checkpoints", metavar="CLUSTER", about="Delete them too; repeat the cluster's name."),
    ] = None,
    cluster: Cluster = None,
) -> None:
    """Take everything away but the checkpoints.

    Jobs that are not over end as cancelled, after a last checkpoint. Fails if a machine or anything else is left, and
    names it.
    """
    access = reach(cluster)
    name = access.cluster.name
    if delete_checkpoints not in (None, name):
        raise BadInput(f"--delete-checkpoints {delete_checkpoints} is not the cluster that goes", f"that is {name}")
    waiting = _unfinished(access)
    if waiting and not yes and not confirm(f"{', '.join(waiting)} will be cancelled. Go on?", unattended=True):
        raise GpuctlError("nothing was changed", "let the jobs end first, or answer y")
    _drain(access.store, waiting)
    left = _take_away(access, force=force)
    if left:
        for thing in left:
            out(f"left: {thing}")
        raise GpuctlError(f"{count(len(left), 'thing')} could not be taken away", "run `gpuctl down` again")
    out(f"cluster {name} is down")
    if delete_checkpoints:
        entries = access.store.list("")
        access.store.delete([entry.key for entry in entries])
        out(f"deleted: {count(len(entries), 'object')}, {size(sum(entry.size for entry in entries))}")
    else:
        _tell_what_stays(access.store)


def _unfinished(access: Access) -> list[str]:
    """A cloud's bucket may never have come to be; what was made before it goes all the same."""
    try:
        return status.unfinished(access.store)
    except (StoreError, StoreUnavailable) as error:
        if access.cluster.provider not in CLOUDS:
            raise
        say(f"no job can be asked to end: {error.message}")
        return []


def _drain(store: Bucket, waiting: list[str]) -> None:
    """Every job ends by itself, if there is a node that can see to it, and by our word if there is none."""
    for job in waiting:
        jobs.ask_to_cancel(store, job)
    until = time.monotonic() + _DRAIN_S
    while time.monotonic() < until and _somebody_lives(store):
        if all(jobs.outcome(store, job) for job in waiting):
            break
        time.sleep(jobs.poll_s(store))
    for job in waiting:
        jobs.end_as_cancelled(store, job, "the cluster was taken down")
        ended = jobs.outcome(store, job)
        say(f"job {job} {ended.result if ended else 'cancelled'}")


def _somebody_lives(store: Bucket) -> bool:
    return any(node.state in ("live", "leaving", "new") for node in status.read_cluster(store, "").nodes)


def _take_away(access: Access, *, force: bool) -> list[str]:
    """Names what is left."""
    if access.cluster.provider not in CLOUDS:
        from gpuctl.stacks.provider import provider

        return provider(access.cluster.provider).down(access.cluster, say, force=force)
    from gpuctl.cli.renting import renting
    from gpuctl.stacks import last_up

    last = last_up.of(access.cluster.name)
    with renting(last.backend) as rented:
        return rented.down(last.request, force=force)


def _tell_what_stays(store: Bucket) -> None:
    try:
        entries = store.list("")
    except (StoreError, StoreUnavailable) as error:
        say(f"what stays is not known: {error.message}")
        return
    kept = sum(entry.size for entry in entries)
    if entries:
        url = shown(store.url)
        out(f"what stays: {url} ({count(len(entries), 'object')}, {size(kept)})")
        say(f"see: gpuctl ckpt ls --bucket {url}")
