"""``gpuctl cost``: the cost of a cluster's machines so far."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from gpuctl.cli.render.terminal import ago, count, out, out_json, say, table
from gpuctl.cli.session.open_cluster import reach
from gpuctl.cli.settings.options import Bucket, Cluster, Output, wants_json
from gpuctl.cluster import layout
from gpuctl.cluster.errors import GpuctlError
from gpuctl.cluster.records.clusters import ClusterSpec
from gpuctl.cluster.records.codec import decode
from gpuctl.cluster.storage.bucket import Bucket as Store
from gpuctl.cluster.views import usage
from gpuctl.stacks.catalog.instance_types import CloudName, catalog, cloud_named

if TYPE_CHECKING:
    from gpuctl.stacks.catalog.billing import Bill, History


def verb(output: Output = "text", cluster: Cluster = None, bucket: Bucket = None) -> None:
    """Show the cost of a cluster's machines so far.

    By node and by the spot price that was in force, beside what on-demand would have cost. With --bucket also of a
    cluster that is gone.
    """
    as_json = wants_json(output)
    access = reach(cluster, bucket)
    found = usage.read(access.store)
    provider = _provider(access.cluster.provider, access.store, [one.type for one in found])
    if provider is None:
        say("nothing was rented")
        if as_json:
            out_json({"lines": [], "usd": 0.0, "on_demand_usd": 0.0, "unknown": 0})
        return
    from gpuctl.stacks.catalog.billing import bill

    made = bill(provider, found, _history(provider))
    if as_json:
        out_json(msgspec.to_builtins(made))
    else:
        _show(made)


def _provider(known: str, store: Store, types: Sequence[str]) -> CloudName | None:
    """The cluster's provider; where only the bucket of a removed cluster is known, that of its machines."""
    if not types:
        return None
    if not known and (data := store.get(layout.CLUSTER)) is not None:
        known = decode(data, ClusterSpec, layout.CLUSTER).provider
    sold_by = {machine.name: machine.provider for machine in catalog().types}
    return cloud_named(known) or sold_by.get(types[0])


def _history(provider: CloudName) -> History:
    """The past prices that the cloud remembers. Without credentials for it the catalog must do, which is said once."""
    from gpuctl.stacks.clouds.interface import cloud

    there = cloud(provider)
    refused = False

    def ask(kind: str, zone: str, since: float, until: float) -> Sequence[tuple[float, float]]:
        nonlocal refused
        if refused:
            return ()
        try:
            return there.price_history(kind, zone, since, until)
        except GpuctlError as error:
            refused = True
            say(f"past prices of {provider} are not available: {error}")
            return ()

    return ask


def _show(made: Bill) -> None:
    header = ("NODE", "TYPE", "ZONE", "BOOTED", "HOURS", "$", "$ ON DEMAND")
    rows = [
        [
            line.usage.node,
            line.usage.type,
            line.usage.zone,
            ago(line.usage.since),
            f"{line.hours:.2f}",
            _usd(line.usd, line.by_catalog and line.usage.life == "spot"),
            _usd(line.on_demand_usd),
        ]
        for line in made.lines
    ]
    for text in table(header, rows, give=[0, 1]):
        out(text)
    out(f"so far: ${made.usd:.2f}; on demand: ${made.on_demand_usd:.2f}")
    if any(line.by_catalog and line.usage.life == "spot" for line in made.lines):
        say(f"~: estimated from the catalog's spot price (of {catalog().date} or later), not that of those hours")
    if made.unknown:
        say(f"not included: {count(made.unknown, 'machine')} without a known price (see: gpuctl offers --refresh)")
    say("machines only: volumes, addresses, traffic and the bucket are on the cloud's bill")


def _usd(usd: float | None, about: bool = False) -> str:
    return "-" if usd is None else f"{'~' if about else ''}{usd:.2f}"
