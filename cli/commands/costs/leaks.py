"""``gpuctl leaks``: finds resources left in a cloud, and what they cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import typer

from gpuctl.cli.commands.costs.cloud_regions import RegionSet, clouds_to_ask, places_of
from gpuctl.cli.render.terminal import count, out, out_json, say, table
from gpuctl.cli.settings.options import Output, text_option, wants_json
from gpuctl.cli.settings.resolve import load
from gpuctl.cluster.errors import GpuctlError
from gpuctl.stacks.clouds.answers import Leftover, Scan
from gpuctl.stacks.clouds.interface import cloud


def verb(
    provider: Annotated[
        str | None,
        text_option("--provider", metavar="NAME", about="Cloud to look into (default: all that were used from here)."),
    ] = None,
    region: Annotated[
        list[str] | None,
        text_option("--region", metavar="NAME", about="Where to look; may be repeated (default: all used from here)."),
    ] = None,
    all_regions: Annotated[bool, typer.Option("--all-regions", help="Look into every region of the account.")] = False,
    cluster: Annotated[
        str | None, text_option("--cluster", "-c", metavar="NAME", about="Only of this cluster (default: of all).")
    ] = None,
    output: Output = "text",
) -> None:
    """Find resources left in a cloud, and what they cost.

    It looks for gpuctl's tags, so a cluster that is up is listed too. Buckets are not: see gpuctl buckets ls. It looks
    into every region that was used from this machine, and the one that `up` would take. Exits 1 if anything is there,
    or could not be looked at.
    """
    as_json = wants_json(output)
    named = ["all"] if all_regions else region or []
    settings = load({"cluster": cluster, "provider": provider}, only=("cluster", "provider", "region"))
    searched = [places_of(name, named, cluster, settings) for name in clouds_to_ask(settings, cluster)]
    scans = [(places, cloud(places.provider).leftovers(places.regions, cluster)) for places in searched]
    found = [one for _, scan in scans for one in scan.found]
    usd = sum(scan.usd_per_hour for _, scan in scans)
    unseen = [line for places, scan in scans for line in _unseen(places, scan)]
    if as_json:
        out_json(_as_json(scans, found, unseen, usd))
    else:
        _show(found)
        for line in unseen:
            say(f"not checked: {line}")
        for places, scan in scans:
            say(f"looked in {places.describe(scan.regions)}")
    if found:
        where = "|".join(places.provider for places, scan in scans if scan.found)
        raise GpuctlError(
            f"{count(len(found), 'thing')} there, ${usd:.2f}/h",
            "gpuctl down --cluster NAME; if it was made elsewhere: gpuctl down --by-tag NAME --provider "
            f"{where} --region REGION",
        )
    if unseen:
        raise GpuctlError("not everything could be checked", "this list may be incomplete")
    if not as_json:
        say("nothing is left")


def _unseen(places: RegionSet, scan: Scan) -> list[str]:
    """A line for what was refused, and for each region that was to be looked at and was not."""
    told = " ".join(scan.unseen)
    missed = [name for name in places.regions if name not in ("all", *scan.regions) and name not in told]
    return [*scan.unseen, *(f"region {name} of {places.provider}" for name in missed)]


def _as_json(
    scans: Sequence[tuple[RegionSet, Scan]], found: Sequence[Leftover], unseen: Sequence[str], usd: float
) -> dict[str, Any]:
    looked = [
        {"provider": places.provider, "region": region, "why": places.why.get(region, "all regions")}
        for places, scan in scans
        for region in scan.regions
    ]
    return {
        "looked_in": looked,
        "regions": [one["region"] for one in looked],
        "found": msgspec.to_builtins(found),
        "unseen": list(unseen),
        "usd_per_hour": usd,
    }


def _show(found: Sequence[Leftover]) -> None:
    if found:
        header = ("CLUSTER", "KIND", "ID", "ABOUT", "REGION", "$/H")
        for line in table(header, [_row(one) for one in found], give=[3, 2]):
            out(line)


def _row(one: Leftover) -> list[str]:
    usd = "-" if one.usd_per_hour is None else f"{one.usd_per_hour:.4g}"
    return [one.cluster, one.kind, one.id, one.about, one.region or "-", usd]
