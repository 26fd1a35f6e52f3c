"""``gpuctl jupyter``: JupyterLab where a job's workers run, forwarded to this machine."""

from __future__ import annotations

import secrets
from functools import partial
from typing import Annotated

import typer

from gpuctl.cli.commands.nodes.port_forward import PortForward, served
from gpuctl.cli.render.terminal import say
from gpuctl.cli.session import node_access
from gpuctl.cli.session.open_cluster import reach
from gpuctl.cli.settings.options import Bucket, Cluster, text_option
from gpuctl.cluster.jobs import queue


def verb(
    node: Annotated[
        str | None, typer.Argument(metavar="NODE", help="Node name, or index in rank order (default: 0, rank 0).")
    ] = None,
    job: Annotated[str | None, text_option("--job", metavar="JOB", about="Job id (default: the newest).")] = None,
    cluster: Cluster = None,
    bucket: Bucket = None,
) -> None:
    """Run JupyterLab where a job runs, and forward it.

    Prints the URL with its token, once, and stays until Ctrl-C, which ends Jupyter and its kernels. jupyterlab must be
    among the job's packages. The connection counts as a login: the machine does not take itself for idle meanwhile.
    """
    with node_access.reached(reach(cluster, bucket)) as nodes:
        whose = queue.find(nodes.store, job).job
        host = nodes.chosen(node)
        say(f"Jupyter of {whose} on {host.node}")
        token = secrets.token_urlsafe(24)
        command = nodes.shell.python(host, "gpuctl.bootstrap.jupyter", [whose])
        jupyter = partial(served, nodes, host, command, "Jupyter", "see above", first=f"{token}\n".encode())
        PortForward(nodes, host, jupyter, f"/lab?token={token}").until_ctrl_c()
