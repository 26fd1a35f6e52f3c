"""``gpuctl offers``"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from gpuctl.cli.options import Output, dollars, parse_flag, text_option, wants_json, whole_number
from gpuctl.cli.terminal import number, out, out_json, say, table
from gpuctl.cluster.errors import BadInput
from gpuctl.stacks.machines import CLOUDS, catalog
from gpuctl.stacks.offers import Offer, Wanted, offers


def verb(
    gpu: Annotated[str | None, text_option("--gpu", metavar="NAME", about="Such as A100, or A100-80GB.")] = None,
    gpus: Annotated[str | None, text_option("--gpus", metavar="N", about="GPUs of one machine.")] = None,
    max_price: Annotated[
        str | None, text_option("--max-price", metavar="USD", about="Most that an hour of one machine may cost.")
    ] = None,
    provider: Annotated[str | None, text_option("--provider", metavar="NAME", about="aws, gcp or azure.")] = None,
    region: Annotated[str | None, text_option("--region", metavar="NAME", about="Such as us-east-1.")] = None,
    output: Output = "text",
) -> None:
    """List machines that could be rented, the cheapest GPU first.

    Prices are those of the catalog that comes with gpuctl, of the day that is shown.
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
    say(f"prices of {catalog().date}; - is one that nobody has told, $/GPU-H is spot where that is known")


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
        "on_demand_usd_per_hour": on_demand,
        "spot_usd_per_gpu_hour": offer.usd_per_gpu(spot=True),
        "on_demand_usd_per_gpu_hour": offer.usd_per_gpu(spot=False),
    }
