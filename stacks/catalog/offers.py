"""Machines that could be rented: instance types with their prices, the cheapest first. From the catalog alone, so it
costs no request and no credentials.

What ``up`` takes where no type is named (``choose``): of all that fits, in the regions that are wanted, the machines
with the fewest GPUs, and of these the cheapest. A price on demand is an upper bound where the spot price is not known.
What has no price at all is never taken, and where it may well cost less than half, nothing else is taken instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec

from gpuctl.cluster.errors import BadInput
from gpuctl.stacks.catalog.instance_types import Catalog, MachineType, Price, catalog

_MANY_TIMES = 2.0
"""A machine that costs so many times what another that fits would cost is not taken for want of a price."""
_NAMED = 3
"""Of what was not taken, in a line."""


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """An instance type in a region."""

    machine: MachineType
    price: Price

    def usd(self, *, spot: bool) -> float | None:
        """US dollars for an hour of one machine; ``None`` if unknown or not sold that way."""
        if spot:
            return self.price.spot if self.machine.spot else None
        return self.price.on_demand

    def usd_per_gpu(self, *, spot: bool) -> float | None:
        usd = self.usd(spot=spot)
        return None if usd is None else usd / self.machine.gpus

    def date(self, *, spot: bool) -> str:
        """The price's date as YYYY-MM-DD; empty where there is none."""
        if self.usd(spot=spot) is None:
            return ""
        return (self.price.spot_date if spot else "") or self.price.date or catalog().date


@dataclass(frozen=True, slots=True)
class MachineFilter:
    """Requirements on a machine; ``None`` means any."""

    provider: str | None = None
    regions: tuple[str, ...] = ()
    """Empty: any."""
    gpu: str | None = None
    """A part of its name, such as ``A100``; upper and lower case are the same."""
    gpus: int | None = None
    """Of each machine."""
    max_price: float | None = None
    """US dollars for an hour of one machine, as spot where that price is known."""

    def names(self, machine: MachineType) -> bool:
        """Whether ``gpu`` names this machine's GPU, and not others whose names contain it too, as ``100`` would."""
        return bool(self.gpu) and machine.gpu.lower().startswith((self.gpu or "").lower())

    def takes(self, offer: Offer) -> bool:
        machine, usd = offer.machine, best_usd(offer)
        return (
            self.provider in (None, machine.provider)
            and (not self.regions or offer.price.region in self.regions)
            and (self.gpu is None or self.gpu.lower() in machine.gpu.lower())
            and self.gpus in (None, machine.gpus)
            and (self.max_price is None or (usd is not None and usd <= self.max_price))
        )


@dataclass(frozen=True, slots=True)
class OfferChoice:
    """The offer that ``up`` takes, and others that fit."""

    offer: Offer
    dearer: tuple[Offer, ...] = ()
    """With as many GPUs, the cheapest first."""
    left_out: tuple[str, ...] = ()
    """With why: there is no price, it is not sold as spot, or too old."""

    def describe(self, *, spot: bool) -> Iterator[str]:
        """Describe the choice in at most two lines."""
        if self.dearer:
            yield f"also considered: {_some([_priced(one, spot=spot) for one in self.dearer])}"
        if self.left_out:
            yield f"left out: {_some(self.left_out)}"


def offers(wanted: MachineFilter, known: Catalog | None = None) -> list[Offer]:
    """The cheapest GPU-hour first, what has no price last. A type without any price is in a region of no name."""
    known = known or catalog()
    somewhere = {price.type for price in known.prices}
    nowhere = [Price(type=machine.name, region="") for machine in known.types if machine.name not in somewhere]
    types = {machine.name: machine for machine in known.types}
    found = [Offer(machine=types[price.type], price=price) for price in (*known.prices, *nowhere)]
    return sorted(filter(wanted.takes, found), key=_order)


def in_cheapest_regions(found: Sequence[Offer]) -> list[Offer]:
    """Each instance type of ``offers`` once, in its cheapest region."""
    best: dict[str, Offer] = {}
    for offer in found:
        best.setdefault(offer.machine.name, offer)
    return list(best.values())


def choose(wanted: MachineFilter, *, spot: bool) -> OfferChoice:
    """Choose the machine for an ``up`` that names no type (see above). Raises ``BadInput`` if nothing with a price
    fits, and where what has none would probably cost far less.

    What cannot work with what gpuctl installs is taken only where its GPU is named, for ``validators`` to say so.
    """
    fitting = offers(replace(wanted, gpus=None))
    usable = [one for one in fitting if _why_not(one.machine, wanted, spot=spot) is None]
    gpus = wanted.gpus or min((one.machine.gpus for one in usable), default=0)
    fitting = [one for one in fitting if one.machine.gpus == gpus]
    usable = [one for one in usable if one.machine.gpus == gpus]
    if not usable:
        raise _nothing(wanted, spot=spot)
    priced = sorted(
        (one for one in usable if best_usd(one, spot=spot) is not None),
        key=lambda one: (best_usd(one, spot=spot) or math.inf, one.machine.name, one.price.region),
    )
    names = {one.machine.name for one in priced}
    silent = _smallest_first(one.machine for one in usable if one.machine.name not in names)
    if not priced:
        raise _no_price(silent, wanted, spot=spot)
    taken = priced[0]
    usd = best_usd(taken, spot=spot) or 0.0
    if far_cheaper := [one for one in silent if _guess(one, spot=spot) * _MANY_TIMES <= usd]:
        said = f"{taken.machine.name} costs ${usd:.2f}/h, but may not be the cheapest: price not available for "
        raise BadInput(f"{said}{some_of(far_cheaper)}", _how_to_go_on(far_cheaper[0], wanted, spot=spot))
    return OfferChoice(
        taken, tuple(priced[1:]), tuple(_left_out([one for one in fitting if one not in priced], wanted, spot))
    )


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


def _left_out(others: Sequence[Offer], wanted: MachineFilter, spot: bool) -> Iterator[str]:
    for machine in _smallest_first(one.machine for one in others):
        why = _why_not(machine, wanted, spot=spot) or "price not available"
        regions = sorted(one.price.region for one in others if one.machine == machine)
        where = f" in {', '.join(regions)}" if len(wanted.regions) > 1 else ""
        yield f"{machine.name}{where} ({why})"


def _priced(offer: Offer, *, spot: bool) -> str:
    """Such as ``g6.xlarge in us-east-1 ($0.80/h on demand)``."""
    kind = " on demand" if spot and offer.usd(spot=True) is None else ""
    return f"{offer.machine.name} in {offer.price.region} (${best_usd(offer, spot=spot):.2f}/h{kind})"


def _smallest_first(machines: Iterable[MachineType]) -> list[MachineType]:
    """GPU names, each once, the smallest first."""
    named = {one.name: one for one in machines}
    return sorted(named.values(), key=lambda one: (one.gpu_memory_gb, one.vcpus, one.name))


def _why_not(machine: MachineType, wanted: MachineFilter, *, spot: bool) -> str | None:
    """Explain why no offer fits."""
    if spot and not machine.spot:
        return "not sold as spot"
    if machine.before_turing and not wanted.names(machine):
        return f"{machine.gpu}: too old"
    return None


def _guess(machine: MachineType, *, spot: bool) -> float:
    """The price that a machine may have: as in the cheapest region that has a price, or as any machine with that GPU
    for each of its GPUs. ``inf`` where nothing is known."""
    known = [one for one in offers(MachineFilter()) if best_usd(one, spot=spot) is not None]
    own = [best_usd(one, spot=spot) or 0.0 for one in known if one.machine == machine]
    like = [(best_usd(one, spot=spot) or 0.0) / one.machine.gpus for one in known if one.machine.gpu == machine.gpu]
    if own:
        return min(own)
    return min(like) * machine.gpus if like else math.inf


def _nothing(wanted: MachineFilter, *, spot: bool) -> BadInput:
    """The error where no machine fits: it is of another region, not sold as spot, or there is none."""
    anywhere = [one for one in offers(replace(wanted, regions=())) if _why_not(one.machine, wanted, spot=spot) is None]
    if places := sorted({one.price.region for one in anywhere if one.price.region}):
        return BadInput(
            f"no matching machine is available in {', '.join(wanted.regions)}", f"available in --region {_some(places)}"
        )
    sold = " as spot" if spot else ""
    return BadInput(f"no matching machine is available{sold}", "ask for something else; `gpuctl offers` shows all")


def _no_price(silent: Sequence[MachineType], wanted: MachineFilter, *, spot: bool) -> BadInput:
    where = f" in {', '.join(wanted.regions)}" if wanted.regions else ""
    said = f"price not available{where} for {some_of(silent)}"
    return BadInput(said, _how_to_go_on(silent[0], wanted, spot=spot))


def _how_to_go_on(machine: MachineType, wanted: MachineFilter, *, spot: bool) -> str:
    region = ",".join(wanted.regions) or "REGION"
    return f"name one with --type{f', or: {refreshing(machine, region)}' if spot else ''}"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more}"


def _order(offer: Offer) -> tuple[float, str, str]:
    usd = best_usd(offer)
    return (math.inf if usd is None else usd / offer.machine.gpus, offer.machine.name, offer.price.region)
