"""``gpuctl buckets``: lists and deletes the buckets of past clusters."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import typer

from gpuctl.cli.commands.costs.cloud_regions import RegionSet, clouds_to_ask, places_of
from gpuctl.cli.render.terminal import confirm, count, out, out_json, say, size, table
from gpuctl.cli.session.bucket_use import BucketUse, look_into
from gpuctl.cli.settings.options import Output, text_option, wants_json
from gpuctl.cli.settings.resolve import load
from gpuctl.cli.text_commands import TextCommand, new_app
from gpuctl.cluster.errors import BadInput, GpuctlError
from gpuctl.cluster.storage.error_mapping import to_reopen
from gpuctl.stacks.catalog.instance_types import CloudName
from gpuctl.stacks.clouds.answers import KeptBucket
from gpuctl.stacks.clouds.interface import cloud

app = new_app(name="buckets", help="List or delete buckets of past clusters.")

Provider = Annotated[
    str | None,
    text_option("--provider", metavar="NAME", about="aws, gcp or azure (default: all that were used from here)."),
]
Region = Annotated[
    list[str] | None,
    text_option("--region", metavar="NAME", about="Where to look; may be repeated (default: all used from here)."),
]
AllRegions = Annotated[bool, typer.Option("--all-regions", help="Look into every region of the account.")]


@app.command(cls=TextCommand)
def ls(
    provider: Provider = None,
    region: Region = None,
    all_regions: AllRegions = False,
    output: Output = "text",
    cluster: Annotated[
        str | None, text_option("--cluster", "-c", metavar="NAME", about="Only of this cluster (default: of all).")
    ] = None,
) -> None:
    """List the buckets that gpuctl made, and what keeping them costs.

    Of clusters that are down, and of those that are up. $/MONTH is roughly what the storage alone costs.
    """
    as_json = wants_json(output)
    places, found = _find(provider, region, all_regions, cluster)
    seen = [look_into(name, bucket) for name, bucket in found]
    if as_json:
        out_json({"buckets": [_as_json(one) for one in seen]})
        return
    if seen:
        header = ("CLUSTER", "BUCKET", "REGION", "CREATED", "SIZE", "OBJECTS", "$/MONTH", "IN USE")
        for line in table(header, [_row(one) for one in seen], give=[1]):
            out(line)
    for one in places:
        say(f"looked in {one.describe(one.regions)}")
    if not seen:
        say("no bucket of gpuctl found")


@app.command(cls=TextCommand)
def rm(
    bucket: Annotated[str, typer.Argument(metavar="BUCKET", help="Name or URL, as `gpuctl buckets ls` shows it.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask; needs the bucket's exact name.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Also one that a cluster uses.")] = False,
    provider: Provider = None,
    region: Region = None,
    all_regions: AllRegions = False,
) -> None:
    """Delete a bucket with all that is in it, checkpoints too."""
    _, found = _find(provider, region, all_regions, None)
    name, chosen = _chosen(found, bucket)
    seen = look_into(name, chosen)
    if seen.trouble and not force:
        raise BadInput(
            f"the bucket {chosen.name} cannot be listed: {seen.trouble.message}",
            "check the credentials, or add --force",
        )
    if seen.users and not force:
        hint = "run `gpuctl down` first, or add --force" if seen.up else "to delete what that has left too, add --force"
        raise BadInput(f"the bucket {chosen.name} is used by {' and '.join(seen.users)}", hint)
    _ask(seen, bucket, yes)
    cloud(name).remove_bucket(chosen)
    left = cloud(name).kept_buckets([chosen.region], chosen.cluster)
    if any(one.name == chosen.name for one in left):
        raise GpuctlError(f"the bucket {chosen.name} is still there", "run `gpuctl buckets rm` again")
    out(f"deleted {chosen.name}{_how_much(seen)}")


def _find(
    provider: str | None, region: list[str] | None, all_regions: bool, cluster: str | None
) -> tuple[list[RegionSet], list[tuple[CloudName, KeptBucket]]]:
    settings = load({"cluster": cluster, "provider": provider}, only=("cluster", "provider", "region"))
    named = ["all"] if all_regions else region or []
    places = [places_of(name, named, cluster, settings) for name in clouds_to_ask(settings, cluster)]
    found = [(one.provider, kept) for one in places for kept in cloud(one.provider).kept_buckets(one.regions, cluster)]
    return places, found


def _chosen(found: Sequence[tuple[CloudName, KeptBucket]], text: str) -> tuple[CloudName, KeptBucket]:
    """The buckets that are named, by name or URL. Raises ``BadInput``."""
    fits = [one for one in found if text in (one[1].name, one[1].url, to_reopen(one[1].url), one[1].url.split("?")[0])]
    if len(fits) == 1:
        return fits[0]
    there = ", ".join(one.name for _, one in found) or "none"
    if fits:
        raise BadInput(f"{text} is the name of {len(fits)} buckets", "give its URL, or add --provider")
    raise BadInput(f"no bucket of gpuctl named {text} found in the regions searched", f"there are: {there}")


def _ask(seen: BucketUse, typed: str, yes: bool) -> None:
    name = seen.bucket.name
    if yes:
        if typed != name:
            raise BadInput(f"{typed} is not the bucket's exact name", f"with -y it is: gpuctl buckets rm {name} -y")
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise BadInput(
            "this deletes checkpoints for good and needs confirmation, but there is no terminal",
            f"gpuctl buckets rm {name} -y",
        )
    if not confirm(f"Delete {name} of cluster {seen.bucket.cluster}{_how_much(seen)}?"):
        raise GpuctlError("nothing was deleted", "answer y, or use -y")


def _how_much(seen: BucketUse) -> str:
    return "" if seen.objects is None else f", {count(seen.objects, 'object')}, {size(seen.bytes or 0)}"


def _row(one: BucketUse) -> list[str]:
    usd, kept = one.usd_per_month, one.bucket
    return [
        kept.cluster,
        kept.name,
        kept.region,
        kept.created or "-",
        "-" if one.bytes is None else size(one.bytes),
        "-" if one.objects is None else str(one.objects),
        "-" if usd is None else f"{usd:.2f}",
        ", ".join(one.users) or ("unknown" if one.trouble else "no"),
    ]


def _as_json(one: BucketUse) -> dict[str, Any]:
    told: dict[str, Any] = msgspec.to_builtins(one.bucket)
    return {
        **told,
        "provider": one.provider,
        "objects": one.objects,
        "bytes": one.bytes,
        "usd_per_month": one.usd_per_month,
        "used_by": list(one.users),
        "trouble": one.trouble.message if one.trouble else "",
    }
