"""``gpuctl preempt``"""

from __future__ import annotations

from typing import Annotated

import typer

from gpuctl.cli.access import reach
from gpuctl.cli.options import Cluster
from gpuctl.cli.terminal import say


def verb(
    node: Annotated[str, typer.Argument(metavar="NODE", help="Its name, as `gpuctl status` shows it.")],
    notice: Annotated[
        float, typer.Option(metavar="S", min=0, help="Seconds between the notice and the end; 0: no notice.")
    ] = 30.0,
    replace_after: Annotated[
        float | None,
        typer.Option(metavar="S", min=0, help="Seconds until a new node takes its place.", show_default="never"),
    ] = None,
    cluster: Cluster = None,
) -> None:
    """Take a node away the way a cloud would.

    A notice first, then an end without mercy for everything on the node, then perhaps a replacement.
    """
    access = reach(cluster)
    from gpuctl.stacks.provider import provider

    provider(access.cluster.provider).preempt(access.cluster, node, notice, replace_after, say)
