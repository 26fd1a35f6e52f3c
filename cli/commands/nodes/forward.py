"""``gpuctl forward``: forwards a node's port, or TensorBoard, to this machine."""

from __future__ import annotations

import re
from functools import partial
from typing import Annotated

import typer

from gpuctl.cli.commands.nodes.port_forward import PortForward, served
from gpuctl.cli.render.terminal import out, say
from gpuctl.cli.session import node_access
from gpuctl.cli.session.open_cluster import reach
from gpuctl.cli.settings.options import Bucket, Cluster, text_option
from gpuctl.cluster import layout
from gpuctl.cluster.errors import BadInput
from gpuctl.cluster.jobs import queue
from gpuctl.cluster.storage.bucket import Bucket as Store
from gpuctl.stacks.ssh.commands import LocalShell


def verb(
    what: Annotated[str, typer.Argument(metavar="PORT|tensorboard", help="Port on the node, or tensorboard.")],
    node: Annotated[
        str | None,
        text_option("--node", metavar="NODE", about="Node name, or index in rank order (default: 0, rank 0)."),
    ] = None,
    job: Annotated[
        str | None, text_option("--job", metavar="JOB", about="Job to show in TensorBoard (default: the newest).")
    ] = None,
    cluster: Cluster = None,
    bucket: Bucket = None,
) -> None:
    """Forward a node's port, or TensorBoard, to this machine.

    Prints the URL and stays until Ctrl-C. The port here is the same one if it is free. TensorBoard runs on the node,
    over all that the job has written so far and goes on writing. A tunnel of AWS ends after an hour at the latest, and
    is opened again for the same URL.
    """
    port = None if what == "tensorboard" else parse_port(what)
    if port is not None and job is not None:
        raise BadInput("--job applies to `forward tensorboard` only", "leave it out")
    with node_access.reached(reach(cluster, bucket)) as nodes:
        host = nodes.chosen(node)
        if port is not None and isinstance(nodes.shell, LocalShell):
            nodes.shell.place(host)
            say(f"{host.node} is on this machine: use port {port} directly")
            out(f"http://{host.address}:{port}")
            return
        whose = _job_with_events(nodes.store, job) if port is None else ""
        command = nodes.shell.python(host, "gpuctl.bootstrap.tensorboard", [whose])
        hint = "see above; is it installed there?"
        tensorboard = partial(served, nodes, host, command, "TensorBoard", hint)
        PortForward(nodes, host, tensorboard if port is None else port).until_ctrl_c()


def _job_with_events(store: Store, job: str | None) -> str:
    """One that runs may have them on its nodes, as yet."""

    def has(name: str) -> bool:
        return queue.outcome(store, name) is None or bool(store.list(layout.tensorboard(name)))

    found = queue.find_with(store, job, has).job
    say(f"TensorBoard of {found}")
    return found


def parse_port(text: str) -> int:
    """Parse a port number. Raises ``BadInput``."""
    if not re.fullmatch(r"\d{1,5}", text, re.ASCII) or not 0 < int(text) < 65536:
        raise BadInput(f"{text!r} is not a port", "use one from 1 to 65535, or tensorboard")
    return int(text)
