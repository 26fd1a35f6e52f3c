"""``gpuctl offers``: lists machine types and prices."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import typer

from gpuctl.cli.render.terminal import count, fitting, number, out, out_json, say, table
from gpuctl.cli.session.rental_plan import named_regions, set_regions
from gpuctl.cli.settings.options import Output, dollars, parse_flag, text_option, wants_json, whole_number
from gpuctl.cli.settings.resolve import load
from gpuctl.cluster.errors import BadInput
from gpuctl.stacks.catalog import region_names
from gpuctl.stacks.catalog.instance_types import CLOUDS, CloudName, Price, catalog, keep_spot_prices
from gpuctl.stacks.catalog.offers import MachineFilter, Offer, in_cheapest_regions, offers
from gpuctl.stacks.clouds import regions
from gpuctl.stacks.clouds.interface import cloud

_HEADER = ("TYPE", "CLOUD", "REGION", "GPUS", "MEMORY", "VCPUS", "NETWORK", "FABRIC", "SPOT $/H", "$/H", "$/GPU-H")
_DISPENSABLE = ("VCPUS", "MEMORY", "NETWORK", "FABRIC", "$/H", "CLOUD")
"""Columns, the first to go first where a terminal is narrow. The type has to be whole: --type takes it as it is."""
_NAMED = 3
"""Of a list, in a line."""


def verb(
    gpu: Annotated[str | None, text_option("--gpu", metavar="NAME", about="For example A100, or A100-80GB.")] = None,
    gpus: Annotated[str | None, text_option("--gpus", metavar="N", about="GPUs per machine.")] = None,
    max_price: Annotated[
        str | None, text_option("--max-price", metavar="USD", about="Maximum price of one machine per hour.")
    ] = None,
    provider: Annotated[str | None, text_option("--provider", metavar="NAME", about="aws, gcp or azure.")] = None,
    region: Annotated[
        str | None, text_option("--region", metavar="NAME[,NAME]", about="Show each type in each of these regions.")
    ] = None,
    all_regions: Annotated[
        bool, typer.Option("--all-regions", help="Show each type in every region that sells it, not only the cheapest.")
    ] = False,
    refresh: Annotated[
        bool, typer.Option("--refresh", help="Fetch current spot prices from the cloud, and keep them.")
    ] = False,
    output: Output = "text",
) -> None:
    """List machine types and prices, the cheapest GPU first.

    Each type stands in the region where it is cheapest; with --provider, in those of the setting `region`, if it is
    set. Prices are those of the catalog that comes with gpuctl, of the days that are shown. With --refresh spot prices
    are those of now; a cloud is asked with your credentials (Azure without any), AWS if none is named, in the regions
    that are named, or the one that up would take.
    """
    as_json = wants_json(output)
    if provider is not None:
        cloud(provider)  # refuses an unknown one
    if region is not None and all_regions:
        raise BadInput("--region and --all-regions exclude each other", "leave one of them out")
    names = _named(provider, region, new=refresh)
    if provider is not None and not (names or all_regions or refresh):
        names = _set(provider)
    wanted = MachineFilter(
        provider=provider,
        regions=names,
        gpu=gpu,
        gpus=parse_flag("--gpus", gpus, whole_number(1)),
        max_price=parse_flag("--max-price", max_price, dollars),
    )
    if gpu is not None and not offers(MachineFilter(gpu=gpu)):
        there = sorted({offer.machine.gpu for offer in offers(MachineFilter())})
        raise BadInput(f"unknown GPU {gpu!r}", f"there are: {', '.join(there)}")
    if refresh:
        _refresh(cloud(provider or "aws").name, names, all_regions=all_regions)
    found = offers(wanted)
    if not (names or all_regions):
        found = in_cheapest_regions(found)
    if as_json:
        out_json({"date": catalog().date, "offers": [_as_json(offer) for offer in found]})
        return
    if not found:
        say("nothing fits; gpuctl offers shows all")
        return
    rows = [_row(offer) for offer in found]
    shown = fitting(_HEADER, rows, [_HEADER.index(name) for name in _DISPENSABLE])
    for line in table([_HEADER[i] for i in shown], [[row[i] for i in shown] for row in rows]):
        out(line)
    if hidden := [name for i, name in enumerate(_HEADER) if i not in shown]:
        say(f"no room for {', '.join(hidden)}: a wider terminal or -o json shows all")
    say(_dated(found))


def _named(provider: str | None, flag: str | None, *, new: bool) -> tuple[str, ...]:
    """The regions of the flag. Without a provider, a name is of any cloud. ``new``: see ``region_names``."""
    names = [name.strip() for name in (flag or "").split(",") if name.strip()]
    if provider is not None or new:
        of = cloud(provider or "aws").name
        return tuple(region_names.check(of, name, new=new) for name in names)
    for name in names:
        if not any(region_names.is_known(of, region_names.normal(name)) for of in CLOUDS):
            raise BadInput(f"unknown region {name!r}", "gpuctl offers --all-regions shows all")
    return tuple(region_names.normal(name) for name in names)


def _set(provider: str) -> tuple[str, ...]:
    """The regions of the setting, where ``up`` would rent."""
    told = set_regions(load(only=("region",)), cloud(provider).name)
    if told:
        say(f"region: {', '.join(one.name for one in told)} ({told[0].source})")
    return tuple(one.name for one in told)


def _refresh(provider: CloudName, named: Sequence[str], *, all_regions: bool) -> None:
    """Raises ``BadInput`` if the cloud has no price in a region that was not known before."""
    there = cloud(provider)
    where = list(named)
    if all_regions:
        where = sorted({one.price.region for one in offers(MachineFilter(provider)) if one.price.region})
    elif not where:
        where = [_usual(provider)]
    prices = there.spot_prices(where)
    priced = {price.region for price in prices}
    if unknown := [name for name in where if name not in priced and not region_names.is_known(provider, name)]:
        raise BadInput(f"{provider} has no spot price in {unknown[0]}", "is the region spelled correctly?")
    keep_spot_prices(prices, time.strftime("%Y-%m-%d", time.gmtime()))
    _tell(provider, where, prices)


def _usual(provider: CloudName) -> str:
    """The defaults of ``up`` for a cluster that does not exist."""
    named = named_regions(load(), provider, None)
    region = named[0] if named else regions.choose(provider)
    say(f"region: {region.name} ({region.source})")
    return region_names.check(provider, region.name, new=True)


def _tell(provider: CloudName, where: Sequence[str], prices: Sequence[Price]) -> None:
    """Tell how many prices there are, and which types have none."""
    priced = {price.type for price in prices}
    known = [one.name for one in catalog().types if one.provider == provider and one.spot]
    places = ", ".join(where) if len(where) <= _NAMED else count(len(where), "region")
    if missing := [name for name in known if name not in priced]:
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        say(f"no spot price in {places} for {count(len(missing), 'type')}: {', '.join(missing[:_NAMED])}{more}")
    say(f"{count(len(prices), 'spot price')} of {provider} in {places}")


def _dated(found: Sequence[Offer]) -> str:
    """The days when the prices that are shown were looked up: spot prices change by the hour."""
    told = [
        f"{name} prices of {' to '.join(dict.fromkeys((days[0], days[-1])))}"
        for name, spot in (("spot", True), ("on-demand", False))
        if (days := sorted({day for offer in found if (day := offer.date(spot=spot))}))
    ]
    told = [*told, "as of then"] if told else []
    return "; ".join([", ".join(told)] * bool(told) + ["-: price not available", "$/GPU-H is spot where known"])


def _row(offer: Offer) -> list[str]:
    machine = offer.machine
    per_gpu = offer.usd_per_gpu(spot=True)
    if per_gpu is None:
        per_gpu = offer.usd_per_gpu(spot=False)
    return [
        machine.name,
        machine.provider,
        offer.price.region or "-",
        f"{machine.gpus} {machine.gpu}",
        f"{machine.memory_gb:g} GB",
        number(machine.vcpus),
        f"{machine.network_gbps:g} Gb/s",
        machine.fabric or "-",
        _usd(offer.usd(spot=True)),
        _usd(offer.usd(spot=False)),
        _usd(per_gpu),
    ]


def _usd(amount: float | None) -> str:
    return "-" if amount is None else f"{amount:.2f}"


def _as_json(offer: Offer) -> dict[str, Any]:
    machine: dict[str, Any] = msgspec.to_builtins(msgspec.structs.asdict(offer.machine))
    spot, on_demand = (offer.usd(spot=True), offer.usd(spot=False))
    return {
        **machine,
        "region": offer.price.region,
        "spot_usd_per_hour": spot,
        "spot_date": offer.date(spot=True) or None,
        "on_demand_usd_per_hour": on_demand,
        "on_demand_date": offer.date(spot=False) or None,
        "source": offer.price.source or None,
        "spot_usd_per_gpu_hour": offer.usd_per_gpu(spot=True),
        "on_demand_usd_per_gpu_hour": offer.usd_per_gpu(spot=False),
    }
