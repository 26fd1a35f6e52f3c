"""``gpuctl leaks``"""

from __future__ import annotations

from typing import Annotated

import msgspec

from gpuctl.cli.options import Output, text_option, wants_json
from gpuctl.cli.settings import load
from gpuctl.cli.terminal import count, out, out_json, say, table
from gpuctl.cluster.errors import GpuctlError
from gpuctl.stacks import known
from gpuctl.stacks.cloud import Leftover, Scan, cloud
from gpuctl.stacks.machines import CLOUDS


def verb(
    provider: Annotated[
        str | None,
        text_option("--provider", metavar="NAME", about="Cloud to look into (default: the cluster's, else aws)."),
    ] = None,
    region: Annotated[
        list[str] | None,
        text_option("--region", metavar="NAME", about="Where to look, or all; may be repeated (default: your region)."),
    ] = None,
    cluster: Annotated[
        str | None, text_option("--cluster", "-c", metavar="NAME", about="Only of this cluster (default: of all).")
    ] = None,
    output: Output = "text",
) -> None:
    """Find what clusters have left in a cloud, and what it costs.

    It looks for gpuctl's tags, so a cluster that is up is listed too. Buckets are not: they are kept on purpose.
    Exits 1 if anything is there, or could not be looked at.
    """
    as_json = wants_json(output)
    name = provider or _usual_cloud(cluster)
    there = cloud(name)
    scan = there.leftovers(region or [], cluster)
    if as_json:
        out_json({**msgspec.to_builtins(scan), "usd_per_hour": scan.usd_per_hour})
    else:
        _show(scan, name)
    if scan.found:
        raise GpuctlError(
            f"{count(len(scan.found), 'thing')} there, ${scan.usd_per_hour:.2f}/h", "gpuctl down, or delete by hand"
        )
    if scan.unseen:
        raise GpuctlError("not everything could be looked at", "so this proves nothing")


def _usual_cloud(cluster: str | None) -> str:
    """That of the cluster, if it is known where it is; else the one that is configured."""
    there = known.get(cluster) if cluster else None
    configured = there.provider if there else load().provider
    return configured if configured in CLOUDS else "aws"


def _show(scan: Scan, name: str) -> None:
    if scan.found:
        header = ("CLUSTER", "KIND", "ID", "ABOUT", "REGION", "$/H")
        for line in table(header, [_row(one) for one in scan.found], give=[3, 2]):
            out(line)
    for line in scan.unseen:
        say(f"not seen: {line}")
    if not scan.found and not scan.unseen:
        say(f"nothing is left on {name}, in {', '.join(scan.regions)}")


def _row(one: Leftover) -> list[str]:
    usd = "-" if one.usd_per_hour is None else f"{one.usd_per_hour:.4g}"
    return [one.cluster, one.kind, one.id, one.about, one.region or "-", usd]
