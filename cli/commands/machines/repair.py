"""``gpuctl repair``: replaces missing machines of a rented cluster."""

from __future__ import annotations

from typing import Annotated

import typer

from gpuctl.cli.render.dialog import TerminalDialog
from gpuctl.cli.render.terminal import out
from gpuctl.cli.session.pulumi_consent import install_what_is_missing
from gpuctl.cli.session.renting import WAIT_MINUTES, minutes
from gpuctl.cli.settings.options import Cluster, parse_flag, text_option
from gpuctl.cli.settings.resolve import load
from gpuctl.cli.signals import as_interrupts
from gpuctl.cluster.errors import BadInput
from gpuctl.stacks.providers.interface import RentsMachines, provider
from gpuctl.stacks.request import last_request
from gpuctl.stacks.state import clusters


def verb(
    wait: Annotated[
        str | None, text_option("--wait", metavar="MINUTES", about="Minutes to wait for machines (default: 10).")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Clear what a crashed update left, such as its lock.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Skip the confirmation of costs.")] = False,
    cluster: Cluster = None,
) -> None:
    """Replace missing machines of a rented cluster.

    It is compared with what was asked for: whatever was deleted by hand is made anew, and machines that ended are asked
    for again.
    """
    there = clusters.find(load({"cluster": cluster}, only=("cluster",)).cluster)
    rents = provider(there.provider, TerminalDialog(yes=yes))
    if not isinstance(rents, RentsMachines):
        raise BadInput(f"{there.name} is not on a cloud", "use `gpuctl up`, which starts what is missing")
    given = parse_flag("--wait", wait, minutes)
    install_what_is_missing(last_request.of(there.name).request.provider, yes=yes)
    with as_interrupts():
        rents.repair(there.name, wait_s=60 * (WAIT_MINUTES if given is None else given), force=force)
    out(f"cluster {there.name} is complete")
