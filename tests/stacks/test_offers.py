"""Which machines fit, in which order, and what is taken where no type is named."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gpuctl.cluster.errors import BadInput
from gpuctl.stacks import offers as module
from gpuctl.stacks.machines import Catalog, MachineType, Price
from gpuctl.stacks.offers import Wanted, cheapest, maybe_cheaper, offers


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


def names(wanted: Wanted) -> list[str]:
    return [f"{offer.machine.name} {offer.price.region}".strip() for offer in offers(wanted, KNOWN)]


def test_the_cheapest_gpu_hour_comes_first_and_what_has_no_price_last() -> None:
    assert names(Wanted()) == ["never r1", "small g1", "eight r2", "eight r1", "one r1", "secret"]


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (Wanted(gpu="a100", gpus=8), ["eight r2", "eight r1"]),
        (Wanted(gpu="A100-80GB"), []),
        (Wanted(provider="gcp"), ["small g1"]),
        (Wanted(region="r1"), ["never r1", "eight r1", "one r1"]),
        (Wanted(max_price=4.0), ["never r1", "small g1", "one r1"]),
        (Wanted(max_price=3.99), ["never r1", "small g1"]),
        (Wanted(gpu="H100", max_price=1000), []),
    ],
)
def test_only_what_fits_is_offered(wanted: Wanted, found: list[str]) -> None:
    assert names(wanted) == found


def test_what_is_not_sold_as_spot_has_no_spot_price() -> None:
    (offer,) = [offer for offer in offers(Wanted(), KNOWN) if offer.machine.name == "never"]
    assert (offer.usd(spot=True), offer.usd(spot=False)) == (None, 0.1)
    assert offers(Wanted(gpus=8, gpu="A100"), KNOWN)[0].usd_per_gpu(spot=True) == pytest.approx(0.8)


def test_up_takes_the_cheapest_machine_that_is_sold_as_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "catalog", lambda: KNOWN)
    assert cheapest(Wanted(gpu="A100", gpus=1), spot=False).machine.name == "never"
    assert cheapest(Wanted(gpu="A100", gpus=1), spot=True).machine.name == "one"
    assert cheapest(Wanted(gpus=8), spot=True).price.region == "r2"
    with pytest.raises(BadInput, match=r"^nothing that gpuctl knows to be sold as spot fits; ask for something else"):
        cheapest(Wanted(gpu="B200"), spot=True)
    with pytest.raises(BadInput, match=r"^nothing that gpuctl knows to be sold as spot fits"):
        cheapest(Wanted(gpu="A100", gpus=2), spot=True)


def test_what_fits_and_has_no_price_is_named_with_the_way_to_a_price(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "catalog", lambda: KNOWN)
    secret = "secret fits, but nobody has told its price in us-east-1; name one with --type"
    with pytest.raises(BadInput) as told:
        cheapest(Wanted(gpu="H100"), spot=True, usual_region="us-east-1")
    assert str(told.value) == f"{secret}, or: gpuctl offers --refresh --provider aws --region us-east-1"
    with pytest.raises(BadInput) as told:
        cheapest(Wanted(gpu="H100"), spot=False, usual_region="us-east-1")
    assert str(told.value) == secret, "a refresh brings spot prices only"
    with pytest.raises(BadInput) as told:
        cheapest(Wanted(provider="aws", region="r9"), spot=True)
    assert str(told.value).startswith("one and 2 more fit, but nobody has told their price in r9; name one with --type")


def test_what_has_no_price_may_be_cheaper_unless_it_is_more_of_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    larger = (machine("larger", vcpus=16), machine("smaller", vcpus=4), machine("other", gpu="L4"))
    monkeypatch.setattr(module, "catalog", lambda: msgspec.structs.replace(KNOWN, types=(*KNOWN.types, *larger)))
    wanted = Wanted(provider="aws", gpus=1)
    taken = cheapest(wanted, spot=True)
    assert taken.machine.name == "one"
    assert [one.name for one in maybe_cheaper(taken, wanted, spot=True)] == ["smaller", "other"]
    assert maybe_cheaper(taken, Wanted(gpu="A100", gpus=8), spot=True) == []


def test_up_takes_no_gpu_that_cannot_work_unless_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "catalog", lambda: CHEAPEST_IS_OLD)
    for wanted in (Wanted(), Wanted(gpu="100"), Wanted(gpu="a100"), Wanted(gpu="")):
        assert cheapest(wanted, spot=True).machine.name == "new"
    assert cheapest(Wanted(gpu="V100"), spot=True).machine.name == "old"
    assert cheapest(Wanted(gpu="v100-32"), spot=True).machine.name == "older"
    with pytest.raises(BadInput, match="nothing that gpuctl knows to be sold as spot fits"):
        cheapest(Wanted(gpus=8), spot=True)
    assert len(offers(Wanted(gpu="V100"), CHEAPEST_IS_OLD)) == 2, "they are listed all the same"
