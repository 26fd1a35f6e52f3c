"""``gpuctl repair``"""

from __future__ import annotations

from typing import Annotated

import typer

from gpuctl.cli.access import reach
from gpuctl.cli.options import Cluster, parse_flag, text_option
from gpuctl.cli.renting import WAIT_MINUTES, minutes, renting
from gpuctl.cli.terminal import out
from gpuctl.cluster.errors import BadInput
from gpuctl.stacks import last_up
from gpuctl.stacks.machines import CLOUDS


def verb(
    wait: Annotated[str | None, text_option("--wait", metavar="MINUTES", about="For machines (default: 10).")] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Clear what a crashed update has left, such as its lock.")
    ] = False,
    cluster: Cluster = None,
) -> None:
    """Replace what is missing of a rented cluster.

    It is compared with what was asked for: whatever was deleted by hand is made anew, and machines that ended are asked
    for again.
    """
    access = reach(cluster)
    if access.cluster.provider not in CLOUDS:
        raise BadInput(f"{access.cluster.name} is no rented cluster", "`gpuctl up` mends it")
    given = parse_flag("--wait", wait, minutes)
    last = last_up.of(access.cluster.name)
    with renting(last.backend) as rented:
        rented.repair(last, wait_s=60 * (WAIT_MINUTES if given is None else given), force=force)
    out(f"cluster {access.cluster.name} is whole")
