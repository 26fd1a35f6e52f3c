"""``gpuctl jobs``: lists the jobs of a cluster."""

from __future__ import annotations

from typing import Annotated

from gpuctl.cli.render.terminal import ago, number, out, out_json, say, table
from gpuctl.cli.session.open_cluster import reach
from gpuctl.cli.settings.options import Bucket, Cluster, Output, parse_flag, text_option, wants_json, whole_number
from gpuctl.cluster.jobs import queue
from gpuctl.cluster.views.holders import read_past
from gpuctl.cluster.views.job_status import JobState, read_jobs


def verb(
    last: Annotated[str, text_option("--last", "-n", metavar="N", about="Number of jobs (default: 20).")] = "20",
    output: Output = "text",
    cluster: Cluster = None,
    bucket: Bucket = None,
) -> None:
    """List the jobs, the newest last."""
    as_json = wants_json(output)
    most = parse_flag("--last", last, whole_number(1)) or 1
    store = reach(cluster, bucket).store
    found = read_jobs(store, most)
    if not found and read_past(store) is None:
        queue.cluster_spec(store)  # where there is no cluster either, no job will be
    if as_json:
        out_json(found)
    elif found:
        header = ("JOB", "STATE", "ROUND", "STEP", "LOSS", "STEPS/S", "CHECKPOINT", "SUBMITTED", "SCRIPT")
        for line in table(header, [_row(job) for job in found], give=[8, 0]):
            out(line)
    else:
        say("no jobs yet; start one with: gpuctl train script.py")


def _row(job: JobState) -> list[str]:
    return [
        job.job,
        job.state,
        number(job.round),
        number(job.step),
        number(job.loss),
        number(job.steps_per_s),
        f"step {job.checkpoint.step}" if job.checkpoint else "-",
        ago(job.submitted_at),
        " ".join((job.script, *job.args)),
    ]
