"""Deleting what a scan by tag has found, until a later scan finds nothing of it."""

from __future__ import annotations

import re
from collections.abc import Callable

from gpuctl.stacks.clouds.answers import Scan
from gpuctl.stacks.clouds.interface import Cloud

_MACHINES = re.compile(r"(auto scaling groups|instances|instance groups|scale sets|virtual machines)\b", re.IGNORECASE)
"""In what a scan could not look at, by the clouds' words for what holds machines."""
_ROUNDS = 3
"""What was deleted may have kept something else, and may take a while to be gone from the lists."""


def blind(scan: Scan) -> str:
    """The first line of ``scan`` on something that holds machines and could not be looked at; empty: there is none."""
    return next((line for line in scan.unseen if _MACHINES.match(line)), "")


def removed(there: Cloud, scan: Scan, say: Callable[[str], None], again: Callable[[], Scan]) -> Scan:
    """Delete what ``scan`` has found, in several rounds; returns the last scan, with what is left.

    Args:
        there: the cloud.
        scan: what is to go: all that it has found.
        say: is told what the cloud could not delete, and what is not deleted yet.
        again: looks anew for the same things.

    While machines may be left that cannot be listed, only those go that were found: what others stand in does not go
    before them, and they would lose what they need.
    """
    for _ in range(_ROUNDS):
        going = scan.found
        if why := blind(scan):
            going = tuple(one for one in scan.found if _MACHINES.match(f"{one.kind}s"))
            say(f"only machines are removed by tag, because others may be left that cannot be listed: {why}")
        if not going:
            break
        there.remove(going, say)
        scan = again()
    return scan
