"""The catalog of machines that comes with the package."""

from __future__ import annotations

import datetime
import json
from collections import Counter
from pathlib import Path

import pytest

from gpuctl.cluster.errors import BadInput
from gpuctl.stacks.catalog import instance_types
from gpuctl.stacks.catalog.instance_types import MachineType, catalog
from gpuctl.stacks.clouds.gcp import shape
from gpuctl.stacks.clouds.gcp.preflight.checks import quotas
from gpuctl.stacks.request.stack_request import StackRequest

FAMILIES = {
    "aws": {*("p3dn", "p4d", "p4de", "p5", "p5e", "p5en", "p6-b200"), *("g4dn", "g5", "g6", "g6e", "gr6", "g7", "g7e")},
    "gcp": {"a2-highgpu", "a2-megagpu", "a2-ultragpu", "a3-edgegpu", "a3-highgpu", "a3-megagpu", "g2", "n1"},
    "azure": {"nc-t4-v3", "nc-a100-v4", "ncads-h100-v5", "nd-v2", "nd-a100-v4", "nd-h100-v5", "nd-h200-v5"},
}
EFA_CARDS = {
    "p3dn.24xlarge": 1,
    "p4d.24xlarge": 4,
    "p4de.24xlarge": 4,
    "p5.4xlarge": 1,
    "p5.48xlarge": 32,
    "p5e.48xlarge": 32,
    "p5en.48xlarge": 16,
    "p6-b200.48xlarge": 8,
    "g4dn.4xlarge": 0,
    "g4dn.8xlarge": 1,
    "gr6.8xlarge": 1,
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


def test_every_price_is_of_a_type_and_region_and_has_date_and_source() -> None:
    types = {one.name: one for one in catalog().types}
    said = {source.partition(":")[0] for source in catalog().sources}
    for price in catalog().prices:
        assert price.region in catalog().regions[types[price.type].provider]
        assert set(price.source.split()) <= said
        for usd, date in ((price.on_demand, price.date), (price.spot, price.spot_date)):
            assert (usd is None) == (date == "")
            if usd is not None:
                assert 0.1 < usd < 250
                assert datetime.date.fromisoformat(date) <= datetime.date.fromisoformat(catalog().date)
        assert bool(price.source) == (price.on_demand is not None or price.spot is not None)


def test_spot_costs_less_than_on_demand() -> None:
    both = [one for one in catalog().prices if one.spot is not None and one.on_demand is not None]
    assert len(both) > 200
    assert all((one.spot or 0) < (one.on_demand or 0) for one in both)


def test_a_price_for_an_hour_grows_with_the_gpus_of_a_kind() -> None:
    cost = {price.type: price.on_demand or 0.0 for price in catalog().prices if price.region == "us-central1"}
    for family in ("a2-highgpu", "a2-ultragpu", "a3-highgpu"):
        each = [cost[one.name] / one.gpus for one in catalog().types if one.family == family]
        assert max(each) - min(each) < 0.01


def test_common_regions_are_there_with_what_they_sell() -> None:
    sold = {(price.type, price.region) for price in catalog().prices}
    assert {("g5.xlarge", "eu-west-1"), ("p4d.24xlarge", "us-west-2"), ("g2-standard-4", "europe-west4")} <= sold
    assert ("Standard_NC24ads_A100_v4", "westeurope") in sold
    assert {name: len(of) > 25 for name, of in catalog().regions.items()} == dict.fromkeys(
        ("aws", "gcp", "azure"), True
    )


def test_rows_by_hand_say_so() -> None:
    rows = json.loads(Path(instance_types.__file__).with_name("catalog.json").read_text())["types"]
    assert {row["provider"] for row in rows if not row.get("by_hand")} == {"aws"}
    assert all(row["source"] for row in rows)


def test_every_quota_of_a_google_machine_has_a_name() -> None:
    request = StackRequest(cluster="c", provider="gcp", type="t", nodes_min=1, nodes_max=1, region="us-central1")
    for one in catalog().types:
        if one.provider == "gcp":
            assert quotas(request, one)[0][1] == one.gpus


def test_the_catalog_says_who_said_so() -> None:
    for label in ("karpenter-aws", "karpenter-gcp", "karpenter-azure"):
        (source,) = [source for source in catalog().sources if source.startswith(f"{label}: ")]
        assert "@" in source, "with the commit"


def test_one_type_stands_on_one_line() -> None:
    lines = Path(instance_types.__file__).with_name("catalog.json").read_text().splitlines()
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
    hung_on = [one.name for one in catalog().types if "+v100x" in one.name]
    assert old == {"p3dn.24xlarge", "Standard_ND40rs_v2", *hung_on}
    assert len(old) == 6


def test_a_type_that_is_none_names_those_that_are_like_it() -> None:
    with pytest.raises(BadInput, match=r"unknown instance type 'p4d.24xl' on aws.*did you mean p4d.24xlarge"):
        catalog().type("p4d.24xl", "aws")


def test_a_type_of_another_cloud_is_none_of_this_one() -> None:
    with pytest.raises(BadInput, match=r"unknown instance type .* on gcp"):
        catalog().type("p4d.24xlarge", "gcp")


def test_a_file_that_is_no_catalog_is_said_to_be_none(tmp_path: Path) -> None:
    broken = tmp_path / "catalog.json"
    broken.write_text('{"date": "2026-01-01", "types": [{}]}')
    with pytest.raises(BadInput, match="is not a catalog"):
        catalog(broken)


def test_sizes_of_a_family_keep_their_proportions() -> None:
    """GPUs, memory and processors of Google's accelerator families come in one ratio."""
    for family in ("a2-highgpu", "a2-ultragpu", "a3-highgpu"):
        assert len({_per_gpu(one) for one in catalog().types if one.family == family}) == 1


def _per_gpu(machine: MachineType) -> tuple[float, float]:
    return machine.vcpus / machine.gpus, machine.memory_gb / machine.gpus
