"""``gpuctl cost``"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from gpuctl.cli.access import reach
from gpuctl.cli.options import Bucket, Cluster, Output, wants_json
from gpuctl.cli.terminal import ago, count, out, out_json, say, table
from gpuctl.cluster import layout, stays
from gpuctl.cluster.bucket import Bucket as Store
from gpuctl.cluster.errors import GpuctlError
from gpuctl.cluster.records import ClusterSpec, decode
from gpuctl.stacks.machines import CLOUDS, CloudName, catalog

if TYPE_CHECKING:
    from gpuctl.stacks.bill import Bill, History


def verb(output: Output = "text", cluster: Cluster = None, bucket: Bucket = None) -> None:
    """Show what a cluster's machines have cost so far.

    By node and by the spot price that was in force, beside what on-demand would have cost. With --bucket also of a
    cluster that is gone.
    """
    as_json = wants_json(output)
    access = reach(cluster, bucket)
    found = stays.read(access.store)
    provider = _provider(access.cluster.provider, access.store, [stay.type for stay in found])
    if provider is None:
        say("nothing was rented")
        if as_json:
            out_json({"lines": [], "usd": 0.0, "on_demand_usd": 0.0, "unknown": 0})
        return
    from gpuctl.stacks.bill import bill

    made = bill(provider, found, _history(provider))
    if as_json:
        out_json(msgspec.to_builtins(made))
    else:
        _show(made)


def _provider(known: str, store: Store, types: Sequence[str]) -> CloudName | None:
    """Of the cluster; where only the bucket of one that is gone is known, that of its machines."""
    if not types:
        return None
    if not known and (data := store.get(layout.CLUSTER)) is not None:
        known = decode(data, ClusterSpec, layout.CLUSTER).provider
    sold_by = {machine.name: machine.provider for machine in catalog().types}
    return next((one for one in CLOUDS if one == known), sold_by.get(types[0]))


def _history(provider: CloudName) -> History:
    """What the cloud remembers. Without credentials for it the catalog must do, and that is said once."""
    from gpuctl.stacks.cloud import cloud

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
            say(f"{provider} does not tell past prices: {error}")
            return ()

    return ask


def _show(made: Bill) -> None:
    header = ("NODE", "TYPE", "ZONE", "BOOTED", "HOURS", "$", "$ ON DEMAND")
    rows = [
        [
            line.stay.node,
            line.stay.type,
            line.stay.zone,
            ago(line.stay.since),
            f"{line.hours:.2f}",
            _usd(line.usd, line.by_catalog and line.stay.life == "spot"),
            _usd(line.on_demand_usd),
        ]
        for line in made.lines
    ]
    for text in table(header, rows, give=[0, 1]):
        out(text)
    out(f"so far: ${made.usd:.2f}; on demand: ${made.on_demand_usd:.2f}")
    if any(line.by_catalog and line.stay.life == "spot" for line in made.lines):
        say(f"~: by the spot price that the catalog has (of {catalog().date} or later), not by that of those hours")
    if made.unknown:
        say(f"not in it: {count(made.unknown, 'machine')} whose price nobody has told (gpuctl offers --refresh)")
    say("machines only: volumes, addresses, traffic and the bucket are on the cloud's bill")


def _usd(usd: float | None, about: bool = False) -> str:
    return "-" if usd is None else f"{'~' if about else ''}{usd:.2f}"
