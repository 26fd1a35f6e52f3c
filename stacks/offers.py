"""What could be rented: instance types with their prices, the cheapest first. From the catalog alone, so it costs no
request and no credentials.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from gpuctl.cluster.errors import BadInput
from gpuctl.stacks.machines import Catalog, MachineType, Price, catalog


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """One type in one region."""

    machine: MachineType
    price: Price

    def usd(self, *, spot: bool) -> float | None:
        """For an hour of one machine; ``None``: nobody has told us, or it is not sold so."""
        if spot:
            return self.price.spot if self.machine.spot else None
        return self.price.on_demand

    def usd_per_gpu(self, *, spot: bool) -> float | None:
        usd = self.usd(spot=spot)
        return None if usd is None else usd / self.machine.gpus


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a machine must have. ``None``: anything."""

    provider: str | None = None
    region: str | None = None
    gpu: str | None = None
    """A part of its name, such as ``A100``; upper and lower case are the same."""
    gpus: int | None = None
    """Of each machine."""
    max_price: float | None = None
    """US dollars for an hour of one machine, as spot where that price is known."""

    def names(self, machine: MachineType) -> bool:
        """Whether ``gpu`` means this one, and not others that have it in their names too, as ``100`` would."""
        return bool(self.gpu) and machine.gpu.lower().startswith((self.gpu or "").lower())

    def takes(self, offer: Offer) -> bool:
        machine, usd = offer.machine, best_usd(offer)
        return (
            self.provider in (None, machine.provider)
            and self.region in (None, offer.price.region)
            and (self.gpu is None or self.gpu.lower() in machine.gpu.lower())
            and self.gpus in (None, machine.gpus)
            and (self.max_price is None or (usd is not None and usd <= self.max_price))
        )


def offers(wanted: Wanted, known: Catalog | None = None) -> list[Offer]:
    """The cheapest GPU-hour first, what has no price last. A type without any price is in a region of no name."""
    known = known or catalog()
    priced = {price.type for price in known.prices}
    nowhere = [Price(type=machine.name, region="") for machine in known.types if machine.name not in priced]
    types = {machine.name: machine for machine in known.types}
    found = [Offer(machine=types[price.type], price=price) for price in (*known.prices, *nowhere)]
    return sorted(filter(wanted.takes, found), key=_order)


def cheapest(wanted: Wanted, *, spot: bool, usual_region: str = "") -> Offer:
    """What ``up`` takes where no type is named. Raises ``BadInput`` if nothing with a price fits; ``usual_region`` is
    the one that it then speaks of where none is wanted.

    What cannot work with what gpuctl installs is taken only where its GPU is named, for ``rules`` to say so.
    """
    # On-demand prices stand in for spot prices that nobody has told: they are above them.
    priced = [one for one in _fitting(wanted, spot=spot) if best_usd(one, spot=spot) is not None]
    if priced:
        return min(priced, key=lambda offer: (best_usd(offer, spot=spot) or math.inf, offer.machine.name))
    if silent := unpriced(wanted, spot=spot):
        region = wanted.region or usual_region
        said = f"{some_of(silent)} fit, but nobody has told their price in {region}"
        if len(silent) == 1:
            said = f"{silent[0].name} fits, but nobody has told its price in {region}"
        raise BadInput(said, f"name one with --type{f', or: {refreshing(silent[0], region)}' if spot else ''}")
    sold = " to be sold as spot" if spot else ""
    raise BadInput(f"nothing that gpuctl knows{sold} fits", "ask for something else; gpuctl offers shows all")


def unpriced(wanted: Wanted, *, spot: bool) -> list[MachineType]:
    """What fits, the smallest first, and has no price in the region that is wanted; in none at all, if none is."""
    anywhere = _fitting(replace(wanted, region=None, max_price=None), spot=spot)
    priced = {
        offer.machine.name
        for offer in anywhere
        if wanted.region in (None, offer.price.region) and best_usd(offer, spot=spot) is not None
    }
    silent = {offer.machine.name: offer.machine for offer in anywhere if offer.machine.name not in priced}
    return sorted(silent.values(), key=lambda one: (one.gpus, one.gpu_memory_gb, one.vcpus, one.name))


def maybe_cheaper(taken: Offer, wanted: Wanted, *, spot: bool) -> list[MachineType]:
    """Of ``unpriced``, without those that are ``taken`` and more of the same."""
    mine = taken.machine
    return [
        one
        for one in unpriced(wanted, spot=spot)
        if one.gpu != mine.gpu or one.gpus < mine.gpus or one.vcpus < mine.vcpus or one.memory_gb < mine.memory_gb
    ]


def some_of(machines: Sequence[MachineType]) -> str:
    """Such as ``g2-standard-4 and 7 more``."""
    more = f" and {len(machines) - 1} more" if len(machines) > 1 else ""
    return f"{machines[0].name}{more}"


def refreshing(machine: MachineType, region: str) -> str:
    """The command that asks for the spot price."""
    return f"gpuctl offers --refresh --provider {machine.provider} --region {region}"


def best_usd(offer: Offer, *, spot: bool = True) -> float | None:
    """The price as asked for, or the on-demand price where that is unknown."""
    usd = offer.usd(spot=spot)
    return offer.price.on_demand if usd is None else usd


def _fitting(wanted: Wanted, *, spot: bool) -> list[Offer]:
    """What works and is sold so."""
    return [
        offer
        for offer in offers(wanted)
        if (offer.machine.spot or not spot) and (not offer.machine.before_turing or wanted.names(offer.machine))
    ]


def _order(offer: Offer) -> tuple[float, str, str]:
    usd = best_usd(offer)
    return (math.inf if usd is None else usd / offer.machine.gpus, offer.machine.name, offer.price.region)
