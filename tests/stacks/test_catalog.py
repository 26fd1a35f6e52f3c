"""The catalog of machines that comes with the package."""

from __future__ import annotations

import datetime
import json
from collections import Counter
from pathlib import Path

import pytest

from gpuctl.cluster.errors import BadInput
from gpuctl.stacks import machines
from gpuctl.stacks.gcp import shape
from gpuctl.stacks.machines import MachineType, catalog

FAMILIES = {
    "aws": {"p3dn", "p4d", "p4de", "p5", "p5en", "g5", "g6", "g6e"},
    "gcp": {"a2-highgpu", "a2-ultragpu", "a3-highgpu", "g2", "n1"},
    "azure": {"nc-a100-v4", "ncads-h100-v5", "nd-a100-v4", "nd-h100-v5"},
}
EFA_CARDS = {
    "p3dn.24xlarge": 1,
    "p4d.24xlarge": 4,
    "p4de.24xlarge": 4,
    "p5.4xlarge": 1,
    "p5.48xlarge": 32,
    "p5en.48xlarge": 16,
    "g5.4xlarge": 0,
    "g5.8xlarge": 1,
    "g6.48xlarge": 1,
    "g6e.24xlarge": 2,
    "g6e.48xlarge": 4,
}


def test_all_families_are_there() -> None:
    found: dict[str, set[str]] = {}
    for one in catalog().types:
        found.setdefault(one.provider, set()).add(one.family)
    assert found == FAMILIES


def test_names_are_told_apart_and_so_are_prices() -> None:
    assert max(Counter(one.name for one in catalog().types).values()) == 1
    assert max(Counter((price.type, price.region) for price in catalog().prices).values()) == 1


def test_every_price_is_of_a_type_that_is_there_and_has_a_date() -> None:
    known = {one.name for one in catalog().types}
    for price in catalog().prices:
        assert price.type in known
        assert datetime.date.fromisoformat(price.date or catalog().date) <= datetime.date.fromisoformat(catalog().date)
        assert price.on_demand is not None
        assert 0.1 < price.on_demand < 150


def test_a_price_for_an_hour_grows_with_the_gpus_of_a_kind() -> None:
    cost = {price.type: price.on_demand or 0.0 for price in catalog().prices}
    for family in ("a2-highgpu", "a2-ultragpu", "a3-highgpu"):
        each = [cost[one.name] / one.gpus for one in catalog().types if one.family == family]
        assert max(each) - min(each) < 0.01


def test_nobody_invented_a_spot_price() -> None:
    assert [price for price in catalog().prices if price.spot is not None or price.zones] == []


def test_the_catalog_says_who_said_so() -> None:
    for provider in ("AWS", "Google", "Azure"):
        assert any(source.startswith(f"{provider}, prices: ") for source in catalog().sources)


def test_one_type_stands_on_one_line() -> None:
    lines = Path(machines.__file__).with_name("catalog.json").read_text().splitlines()
    types = [json.loads(line.removesuffix(",")) for line in lines if line.startswith('{"provider"')]
    assert len(types) == len(catalog().types)


@pytest.mark.parametrize(("name", "cards"), EFA_CARDS.items())
def test_a_type_has_as_many_cards_as_aws_says(name: str, cards: int) -> None:
    machine = catalog().type(name)
    assert (machine.fabric_cards, machine.fabric) == (cards, "efa" if cards else "")


def test_infiniband_is_between_nd_sizes_only() -> None:
    with_it = {one.name for one in catalog().types if one.fabric == "infiniband"}
    assert with_it == {one.name for one in catalog().types if one.name.startswith("Standard_ND")}


def test_google_has_no_rdma() -> None:
    assert {one.fabric for one in catalog().types if one.provider == "gcp"} == {"gvnic", ""}


def test_what_hangs_on_a_general_machine_is_what_its_name_says() -> None:
    general = [one for one in catalog().types if one.family == "n1"]
    assert {one.gpu for one in general} == {"T4", "V100-16GB"}
    for one in catalog().types:
        if one.provider == "gcp":
            _, hung_on = shape(one)
            assert (hung_on is not None) == (one in general)
            assert hung_on is None or hung_on[1] == one.gpus


def test_the_types_that_cannot_work_with_what_gpuctl_installs_are_known() -> None:
    old = {one.name for one in catalog().types if one.before_turing}
    assert old == {"p3dn.24xlarge", *(one.name for one in catalog().types if "+v100x" in one.name)}
    assert len(old) == 5


def test_a_type_that_is_none_names_those_that_are_like_it() -> None:
    with pytest.raises(BadInput, match=r"'p4d.24xl' is no instance type of aws .*did you mean p4d.24xlarge"):
        catalog().type("p4d.24xl", "aws")


def test_a_type_of_another_cloud_is_none_of_this_one() -> None:
    with pytest.raises(BadInput, match="no instance type of gcp"):
        catalog().type("p4d.24xlarge", "gcp")


def test_a_file_that_is_no_catalog_is_said_to_be_none(tmp_path: Path) -> None:
    broken = tmp_path / "catalog.json"
    broken.write_text('{"date": "2026-01-01", "types": [{}]}')
    with pytest.raises(BadInput, match="is no catalog"):
        catalog(broken)


def test_sizes_of_a_family_keep_their_proportions() -> None:
    """GPUs, memory and processors of Google's accelerator families come in one ratio."""
    for family in ("a2-highgpu", "a2-ultragpu", "a3-highgpu"):
        assert len({_per_gpu(one) for one in catalog().types if one.family == family}) == 1


def _per_gpu(machine: MachineType) -> tuple[float, float]:
    return machine.vcpus / machine.gpus, machine.memory_gb / machine.gpus
