"""``gpuctl offers``"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import typer

from gpuctl.cli.options import Output, dollars, parse_flag, text_option, wants_json, whole_number
from gpuctl.cli.terminal import count, number, out, out_json, say, table
from gpuctl.cluster.errors import BadInput
from gpuctl.stacks.cloud import cloud
from gpuctl.stacks.machines import CLOUDS, catalog, keep_spot_prices
from gpuctl.stacks.offers import Offer, Wanted, offers


def verb(
    gpu: Annotated[str | None, text_option("--gpu", metavar="NAME", about="Such as A100, or A100-80GB.")] = None,
    gpus: Annotated[str | None, text_option("--gpus", metavar="N", about="GPUs of one machine.")] = None,
    max_price: Annotated[
        str | None, text_option("--max-price", metavar="USD", about="Most that an hour of one machine may cost.")
    ] = None,
    provider: Annotated[str | None, text_option("--provider", metavar="NAME", about="aws, gcp or azure.")] = None,
    region: Annotated[str | None, text_option("--region", metavar="NAME", about="Such as us-east-1.")] = None,
    refresh: Annotated[
        bool, typer.Option("--refresh", help="Ask the cloud for its spot prices of now, and keep them.")
    ] = False,
    output: Output = "text",
) -> None:
    """List machines that could be rented, the cheapest GPU first.

    Prices are those of the catalog that comes with gpuctl, of the day that is shown. With --refresh spot prices are
    those of today; a cloud is asked with your credentials (Azure without any), AWS if none is named.
    """
    as_json = wants_json(output)
    if provider is not None and provider not in CLOUDS:
        raise BadInput(f"{provider!r} is no cloud", f"use one of: {', '.join(CLOUDS)}")
    wanted = Wanted(
        provider=provider,
        region=region,
        gpu=gpu,
        gpus=parse_flag("--gpus", gpus, whole_number(1)),
        max_price=parse_flag("--max-price", max_price, dollars),
    )
    if refresh:
        _refresh(provider or "aws", region)
    found = offers(wanted)
    if as_json:
        out_json({"date": catalog().date, "offers": [_as_json(offer) for offer in found]})
        return
    if not found:
        say("nothing fits; gpuctl offers shows all")
        return
    header = ("TYPE", "CLOUD", "REGION", "GPUS", "MEMORY", "VCPUS", "NETWORK", "FABRIC", "SPOT $/H", "$/H", "$/GPU-H")
    for line in table(header, [_row(offer) for offer in found], give=[2, 0]):
        out(line)
    say(f"prices of {_days(found)}; - is one that nobody has told, $/GPU-H is spot where that is known")


def _refresh(provider: str, region: str | None) -> None:
    """In one region, or in all that the catalog has of the cloud."""
    there = cloud(provider)
    regions = [region] if region else sorted({one.price.region for one in offers(Wanted(provider)) if one.price.region})
    prices = there.spot_prices(regions)
    keep_spot_prices(prices, time.strftime("%Y-%m-%d", time.gmtime()))
    where, priced = ", ".join(regions), {price.type for price in prices}
    known = [one.name for one in catalog().types if one.provider == provider and one.spot]
    if missing := [name for name in known if name not in priced]:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        say(f"no spot price in {where} for {count(len(missing), 'type')}: {', '.join(missing[:3])}{more}")
    say(f"{count(len(prices), 'spot price')} of {provider} in {where}")


def _days(found: Sequence[Offer]) -> str:
    """Of the prices, the latest of each kind."""
    spot = max((offer.price.spot_date for offer in found), default="")
    return f"{catalog().date}, spot of {spot}" if spot else catalog().date


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
        "spot_date": offer.price.spot_date or None,
        "on_demand_usd_per_hour": on_demand,
        "spot_usd_per_gpu_hour": offer.usd_per_gpu(spot=True),
        "on_demand_usd_per_gpu_hour": offer.usd_per_gpu(spot=False),
    }
