"""``gpuctl jobs``"""

from __future__ import annotations

from typing import Annotated

import typer

from gpuctl.cli.access import reach
from gpuctl.cli.options import Bucket, Cluster, Format, Output
from gpuctl.cli.terminal import ago, number, out, out_json, say, table
from gpuctl.cluster.status import JobState, read_jobs


def verb(
    last: Annotated[int, typer.Option("--last", "-n", metavar="N", min=1, help="How many.")] = 20,
    output: Output = Format.text,
    cluster: Cluster = None,
    bucket: Bucket = None,
) -> None:
    """List the jobs, the newest last."""
    found = read_jobs(reach(cluster, bucket).store, last)
    if output is Format.json:
        out_json(found)
    elif found:
        header = ("JOB", "STATE", "ROUND", "STEP", "LOSS", "CHECKPOINT", "SUBMITTED", "SCRIPT")
        for line in table(header, [_row(job) for job in found], give=7):
            out(line)
    else:
        say("no job yet: gpuctl train script.py")


def _row(job: JobState) -> list[str]:
    return [
        job.job,
        job.state,
        number(job.round),
        number(job.step),
        number(job.loss),
        f"step {job.checkpoint.step}" if job.checkpoint else "-",
        ago(job.submitted_at),
        " ".join((job.script, *job.args)),
    ]
