"""``gpuctl shell``: a shell, or a command, where a job's workers run."""

from __future__ import annotations

from typing import Annotated

import typer

from gpuctl.cli.command_words import WithCommand, words_of
from gpuctl.cli.session import node_access
from gpuctl.cli.session.open_cluster import reach
from gpuctl.cli.settings.options import Bucket, Cluster, text_option
from gpuctl.cluster.errors import BadInput
from gpuctl.cluster.jobs import queue

COMMAND = WithCommand


def verb(
    ctx: typer.Context,
    node: Annotated[
        str | None, typer.Argument(metavar="NODE", help="Node name, or index in rank order (default: 0, rank 0).")
    ] = None,
    job: Annotated[str | None, text_option("--job", metavar="JOB", about="Job id (default: the newest).")] = None,
    cluster: Cluster = None,
    bucket: Bucket = None,
) -> None:
    """Open a shell where a job runs, or run a command there.

    It has the job's folder, its variables and its packages; of a job with an image, its container while it trains.
    """
    words = words_of(ctx)
    if words == []:
        raise BadInput("no command after `--`", "for example: gpuctl shell 0 -- python -c 'import torch'")
    with node_access.reached(reach(cluster, bucket)) as nodes:
        whose = queue.find(nodes.store, job).job
        host = nodes.chosen(node)
        has_terminal = node_access.has_terminal()
        args = [whose, *(words or [])]
        command = nodes.shell.python(host, "gpuctl.bootstrap.job_shell", args, terminal=has_terminal)
        code = node_access.run(nodes, host, command)
    node_access.leave_with(code)
