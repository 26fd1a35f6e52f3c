"""``gpuctl cancel``"""

from __future__ import annotations

from typing import Annotated

import typer

from gpuctl.cli.access import reach
from gpuctl.cli.options import Bucket, Cluster
from gpuctl.cli.terminal import out
from gpuctl.cluster import jobs


def verb(
    job: Annotated[str, typer.Argument(metavar="JOB", help="Its id, as `gpuctl jobs` shows it.")],
    cluster: Cluster = None,
    bucket: Bucket = None,
) -> None:
    """End a job after a last checkpoint.

    Returns at once; `gpuctl logs -f JOB` shows it end.
    """
    store = reach(cluster, bucket).store
    spec = jobs.find(store, job)
    ended = jobs.outcome(store, spec.job)
    if ended is not None:
        out(f"job {spec.job} has ended already: {ended.result}")
        return
    jobs.ask_to_cancel(store, spec.job)
    out(f"job {spec.job} is asked to end")
