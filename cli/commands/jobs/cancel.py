"""``gpuctl cancel``: cancels a job after a last checkpoint."""

from __future__ import annotations

from typing import Annotated

import typer

from gpuctl.cli.render.terminal import out
from gpuctl.cli.session.open_cluster import reach
from gpuctl.cli.settings.options import Bucket, Cluster
from gpuctl.cluster.jobs import queue


def verb(
    job: Annotated[str, typer.Argument(metavar="JOB", help="The job's id, as shown by `gpuctl jobs`.")],
    now: Annotated[bool, typer.Option("--now", help="Cancel at once, without a last checkpoint.")] = False,
    cluster: Cluster = None,
    bucket: Bucket = None,
) -> None:
    """Cancel a job after a last checkpoint.

    Returns at once; `gpuctl logs -f JOB` shows it end. With --now also after it was asked without.
    """
    store = reach(cluster, bucket).store
    spec = queue.find(store, job)
    ended = queue.outcome(store, spec.job)
    if ended is not None:
        out(f"job {spec.job} has already ended: {ended.result}")
        return
    queue.ask_to_cancel(store, spec.job, now=now)
    out(f"job {spec.job} is being cancelled" + (" at once" if now else ""))
