"""``gpuctl preempt``: preempts a node, as a cloud would."""

from __future__ import annotations

from typing import Annotated

import typer

from gpuctl.cli.render.dialog import TerminalDialog
from gpuctl.cli.session.open_cluster import reach
from gpuctl.cli.settings.options import Cluster, parse_flag, seconds, text_option
from gpuctl.cluster.errors import BadInput
from gpuctl.stacks.providers.interface import CanPreempt, provider


def verb(
    node: Annotated[str, typer.Argument(metavar="NODE", help="The node's name, as shown by `gpuctl status`.")],
    notice: Annotated[
        str, text_option("--notice", metavar="S", about="Seconds between notice and end; 0: no notice (default: 30).")
    ] = "30",
    replace_after: Annotated[
        str,
        text_option(
            "--replace-after", metavar="S", about="Seconds until a replacement starts, or `never` (default: 5)."
        ),
    ] = "5",
    cluster: Cluster = None,
) -> None:
    """Preempt a node, as a cloud would.

    A notice first, then an end without mercy for everything on the node, then a replacement, as its group starts one.
    """
    notice_s = parse_flag("--notice", notice, seconds) or 0.0
    replace_after_s = None if replace_after == "never" else parse_flag("--replace-after", replace_after, _seconds)
    access = reach(cluster)
    there = provider(access.cluster.provider, TerminalDialog())
    if not isinstance(there, CanPreempt):
        raise BadInput(f"machines of {there.name} cannot be preempted on demand", "try it on --provider local")
    there.preempt(access.cluster, node, notice_s, replace_after_s)


def _seconds(text: str) -> float:
    """Parse seconds of notice. Raises ``ValueError``."""
    try:
        return seconds(text)
    except ValueError as error:
        raise ValueError(f"{error}, or never") from error
