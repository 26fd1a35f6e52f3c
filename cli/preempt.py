"""``gpuctl preempt``"""

from __future__ import annotations

from typing import Annotated

import typer

from gpuctl.cli.access import reach
from gpuctl.cli.options import Cluster, parse_flag, seconds, text_option
from gpuctl.cli.terminal import say
from gpuctl.cluster.errors import BadInput
from gpuctl.stacks.machines import CLOUDS


def verb(
    node: Annotated[str, typer.Argument(metavar="NODE", help="Its name, as `gpuctl status` shows it.")],
    notice: Annotated[
        str, text_option("--notice", metavar="S", about="Seconds from the notice to the end; 0: none (default: 30).")
    ] = "30",
    replace_after: Annotated[
        str,
        text_option("--replace-after", metavar="S", about="Seconds until a new node comes, or `never` (default: 5)."),
    ] = "5",
    cluster: Cluster = None,
) -> None:
    """Take a node away the way a cloud would.

    A notice first, then an end without mercy for everything on the node, then a replacement, as its group starts one.
    """
    notice_s = parse_flag("--notice", notice, seconds) or 0.0
    replace_after_s = None if replace_after == "never" else parse_flag("--replace-after", replace_after, seconds)
    access = reach(cluster)
    if access.cluster.provider in CLOUDS:
        raise BadInput(f"{access.cluster.provider} takes machines when it wants to", "try it on --provider local")
    from gpuctl.stacks.provider import provider

    provider(access.cluster.provider).preempt(access.cluster, node, notice_s, replace_after_s, say)
