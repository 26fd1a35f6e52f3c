"""``gpuctl down``"""

from __future__ import annotations

from typing import Annotated

import typer

from gpuctl.cli.access import reach
from gpuctl.cli.options import Cluster
from gpuctl.cli.terminal import confirm, count, out, say, size
from gpuctl.cluster import jobs, status
from gpuctl.cluster.bucket import Bucket
from gpuctl.cluster.errors import GpuctlError
from gpuctl.cluster.refusals import shown


def verb(
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask about unfinished jobs.")] = False,
    cluster: Cluster = None,
) -> None:
    """Take everything away but the checkpoints.

    Jobs that are not over end as cancelled. Fails if a machine or anything else is left, and names it.
    """
    access = reach(cluster)
    from gpuctl.stacks.provider import provider

    waiting = status.unfinished(access.store)
    if waiting and not yes and not confirm(f"{', '.join(waiting)} will be cancelled. Go on?", unattended=True):
        raise GpuctlError("nothing was changed", "let the jobs end first, or answer y")
    for job in waiting:
        if jobs.end_as_cancelled(access.store, job, "the cluster was taken down"):
            say(f"job {job} cancelled")
    left = provider(access.cluster.provider).down(access.cluster, say)
    if left:
        for thing in left:
            out(f"left: {thing}")
        raise GpuctlError(f"{count(len(left), 'thing')} could not be taken away", "run `gpuctl down` again")
    out(f"cluster {access.cluster.name} is down")
    _tell_what_stays(access.store)


def _tell_what_stays(store: Bucket) -> None:
    entries = store.list("")
    kept = sum(entry.size for entry in entries)
    if entries:
        url = shown(store.url)
        out(f"what stays: {url} ({count(len(entries), 'object')}, {size(kept)})")
        say(f"see: gpuctl ckpt ls --bucket {url}")
