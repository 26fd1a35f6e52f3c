"""Which machines fit, in which order, and what is taken where no type is named."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gpuctl.cluster.errors import BadInput
from gpuctl.stacks.catalog import offers as module
from gpuctl.stacks.catalog.instance_types import Catalog, MachineType, Price
from gpuctl.stacks.catalog.offers import MachineFilter, OfferChoice, choose, in_cheapest_regions, offers


def machine(name: str, gpus: int = 1, gpu: str = "A100-40GB", **more: Any) -> MachineType:
    usual: dict[str, Any] = {
        "provider": "aws",
        "family": name.partition(".")[0],
        "gpu_memory_gb": 40,
        "vcpus": 8,
        "memory_gb": 64,
        "network_gbps": 10,
    }
    return MachineType(name=name, gpu=gpu, gpus=gpus, **{**usual, **more})


KNOWN = Catalog(
    date="2026-11-01",
    types=(
        machine("eight", 8),
        machine("one"),
        machine("small", gpu="T4", provider="gcp"),
        machine("secret", 8, gpu="H100"),
        machine("never", spot=False),
    ),
    prices=(
        Price(type="eight", region="r1", on_demand=24.0, spot=8.0),
        Price(type="eight", region="r2", on_demand=24.0, spot=6.4),
        Price(type="one", region="r1", on_demand=4.0),
        Price(type="small", region="g1", on_demand=0.6, spot=0.2),
        Price(type="never", region="r1", on_demand=0.1, spot=0.05),
    ),
)


CHEAPEST_IS_OLD = Catalog(
    date="2026-11-01",
    types=(machine("old", gpu="V100-16GB"), machine("new", gpu="A100-40GB"), machine("older", 8, gpu="V100-32GB")),
    prices=tuple(
        Price(type=name, region="r1", on_demand=2 * usd, spot=usd)
        for name, usd in (("old", 1), ("new", 4), ("older", 2))
    ),
)


def names(wanted: MachineFilter) -> list[str]:
    return [f"{offer.machine.name} {offer.price.region}".strip() for offer in offers(wanted, KNOWN)]


def test_the_cheapest_gpu_hour_comes_first_and_what_has_no_price_last() -> None:
    assert names(MachineFilter()) == ["never r1", "small g1", "eight r2", "eight r1", "one r1", "secret"]


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (MachineFilter(gpu="a100", gpus=8), ["eight r2", "eight r1"]),
        (MachineFilter(gpu="A100-80GB"), []),
        (MachineFilter(provider="gcp"), ["small g1"]),
        (MachineFilter(regions=("r1",)), ["never r1", "eight r1", "one r1"]),
        (MachineFilter(max_price=4.0), ["never r1", "small g1", "one r1"]),
        (MachineFilter(max_price=3.99), ["never r1", "small g1"]),
        (MachineFilter(gpu="H100", max_price=1000), []),
    ],
)
def test_only_what_fits_is_offered(wanted: MachineFilter, found: list[str]) -> None:
    assert names(wanted) == found


def test_what_is_not_sold_as_spot_has_no_spot_price() -> None:
    (offer,) = [offer for offer in offers(MachineFilter(), KNOWN) if offer.machine.name == "never"]
    assert (offer.usd(spot=True), offer.usd(spot=False)) == (None, 0.1)
    assert offers(MachineFilter(gpus=8, gpu="A100"), KNOWN)[0].usd_per_gpu(spot=True) == pytest.approx(0.8)


def chosen(wanted: MachineFilter, *, spot: bool = True) -> OfferChoice:
    return choose(wanted, spot=spot)


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "catalog", lambda: KNOWN)


def has(monkeypatch: pytest.MonkeyPatch, types: tuple[MachineType, ...], prices: tuple[Price, ...]) -> None:
    monkeypatch.setattr(module, "catalog", lambda: Catalog(date="2026-11-01", types=types, prices=prices))


def test_each_type_stands_in_its_cheapest_region() -> None:
    found = in_cheapest_regions(offers(MachineFilter(gpus=8), KNOWN))
    assert [(one.machine.name, one.price.region) for one in found] == [("eight", "r2"), ("secret", "")]


def test_a_price_has_the_day_of_its_own_kind() -> None:
    price = Price(type="one", region="r1", on_demand=4.0, spot=1.0, date="2026-07-20", spot_date="2026-08-03")
    offer = module.Offer(machine=KNOWN.types[1], price=price)
    assert (offer.date(spot=True), offer.date(spot=False)) == ("2026-08-03", "2026-07-20")
    never = module.Offer(machine=KNOWN.types[1], price=Price(type="one", region="r1"))
    assert (never.date(spot=True), never.date(spot=False)) == ("", "")


@pytest.mark.usefixtures("known")
def test_up_takes_the_cheapest_machine_that_is_sold_as_asked_for() -> None:
    assert chosen(MachineFilter(gpu="A100", gpus=1), spot=False).offer.machine.name == "never"
    assert chosen(MachineFilter(gpu="A100", gpus=1)).offer.machine.name == "one"
    assert chosen(MachineFilter(gpu="A100", gpus=8)).offer.price.region == "r2"
    for wanted in (MachineFilter(gpu="B200"), MachineFilter(gpu="A100", gpus=2)):
        with pytest.raises(BadInput, match=r"^no matching machine is available as spot; ask for something else"):
            chosen(wanted)


@pytest.mark.usefixtures("known")
def test_several_regions_are_compared_and_the_others_are_told() -> None:
    choice = chosen(MachineFilter(gpu="A100", gpus=8, regions=("r1", "r2")))
    assert (choice.offer.price.region, list(choice.describe(spot=True))) == (
        "r2",
        ["also considered: eight in r1 ($8.00/h)"],
    )


def test_what_is_left_out_is_told_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    types = (machine("a"), machine("b"), machine("c", spot=False), machine("d", gpu="V100-16GB", gpu_memory_gb=16))
    prices = [Price(type=name, region="r1", on_demand=1.0) for name in "acd"]
    has(monkeypatch, types, (*prices, Price(type="b", region="r1"), Price(type="a", region="r2")))
    told = "d{} (V100-16GB: too old), {}b{} (price not available) and 1 more"
    (line,) = chosen(MachineFilter(regions=("r1",))).describe(spot=True)
    assert line == "left out: d (V100-16GB: too old), b (price not available), c (not sold as spot)"
    (line,) = chosen(MachineFilter(regions=("r1", "r2"))).describe(spot=True)
    assert line == f"left out: {told.format(' in r1', 'a in r2 (price not available), ', ' in r1')}"


def test_without_a_number_of_gpus_the_fewest_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight cost less by the GPU, and in all far more than was asked for."""
    types = (machine("big", 8), machine("small", 1))
    has(monkeypatch, types, tuple(Price(type=name, region="r1", spot=usd) for name, usd in (("big", 8), ("small", 2))))
    assert chosen(MachineFilter()).offer.machine.name == "small"
    assert chosen(MachineFilter(gpus=8)).offer.machine.name == "big"


def test_eight_gpus_are_not_taken_for_want_of_the_price_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    has(
        monkeypatch,
        (machine("big", 8), machine("small", 1)),
        (Price(type="big", region="r1", spot=8), Price(type="small", region="r1")),
    )
    with pytest.raises(BadInput) as told:
        chosen(MachineFilter(provider="aws", regions=("r1",)))
    assert str(told.value) == (
        "price not available in r1 for small; "
        "name one with --type, or: gpuctl offers --refresh --provider aws --region r1"
    )


def test_a_price_elsewhere_that_is_far_lower_stops_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    types = (machine("dear", gpu="H100"), machine("cheap", gpu="L4"))
    here = (Price(type="dear", region="r1", spot=9.0), Price(type="cheap", region="r1"))
    has(monkeypatch, types, (*here, Price(type="cheap", region="r2", spot=4.5)))
    with pytest.raises(BadInput, match=r"^dear costs \$9.00/h, but may not be the cheapest: .* for cheap; name one"):
        chosen(MachineFilter(regions=("r1",)))
    has(monkeypatch, types, (*here, Price(type="cheap", region="r2", spot=4.6)))
    assert chosen(MachineFilter(regions=("r1",))).offer.machine.name == "dear"


@pytest.mark.usefixtures("known")
def test_what_fits_and_has_no_price_is_named_with_the_way_to_a_price() -> None:
    secret = "price not available in us-east-1 for secret; name one with --type"
    with_it = msgspec.structs.replace(KNOWN, prices=(*KNOWN.prices, Price(type="secret", region="us-east-1")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "catalog", lambda: with_it)
        with pytest.raises(BadInput) as told:
            chosen(MachineFilter(gpu="H100", regions=("us-east-1",)))
        assert str(told.value) == f"{secret}, or: gpuctl offers --refresh --provider aws --region us-east-1"
        with pytest.raises(BadInput) as told:
            chosen(MachineFilter(gpu="H100", regions=("us-east-1",)), spot=False)
        assert str(told.value) == secret, "a refresh brings spot prices only"


@pytest.mark.usefixtures("known")
def test_a_region_that_sells_none_names_those_that_do() -> None:
    with pytest.raises(BadInput, match=r"^no matching machine is available in r9; available in --region r1, r2"):
        chosen(MachineFilter(gpu="A100", regions=("r9",)))


def test_up_takes_no_gpu_that_cannot_work_unless_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "catalog", lambda: CHEAPEST_IS_OLD)
    for wanted in (MachineFilter(), MachineFilter(gpu="100"), MachineFilter(gpu="a100"), MachineFilter(gpu="")):
        assert chosen(wanted).offer.machine.name == "new"
    assert chosen(MachineFilter(gpu="V100")).offer.machine.name == "old"
    assert chosen(MachineFilter(gpu="v100-32")).offer.machine.name == "older"
    with pytest.raises(BadInput, match="no matching machine is available as spot"):
        chosen(MachineFilter(gpus=8))
    assert len(offers(MachineFilter(gpu="V100"), CHEAPEST_IS_OLD)) == 2, "they are listed all the same"
