"""Names of regions, as people type them."""

from __future__ import annotations

import pytest

from gpuctl.cluster.errors import BadInput
from gpuctl.stacks.catalog.region_names import check
from gpuctl.stacks.clouds.regions import USUAL


def test_a_region_may_be_spelled_as_the_portal_shows_it() -> None:
    assert check("azure", "East US") == "eastus"
    assert {cloud: check(cloud, name) for cloud, name in USUAL.items()} == USUAL  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("provider", "name", "hint"),
    [("azure", "eastusa", "eastus"), ("aws", "us-esat-1", "us-east-1"), ("gcp", "us-centrall", "us-central1")],
)
def test_a_typing_error_is_refused_with_what_was_meant(provider: str, name: str, hint: str) -> None:
    with pytest.raises(BadInput, match=rf"^unknown region '{name}'; did you mean .*{hint}\b"):
        check(provider, name)  # type: ignore[arg-type]


def test_a_region_of_another_cloud_is_unknown() -> None:
    with pytest.raises(BadInput, match=r"^unknown region 'us-central1'"):
        check("aws", "us-central1", new=True)


def test_a_new_region_is_for_the_cloud_to_judge() -> None:
    assert check("aws", "mx-central-1", new=True) == "mx-central-1"
    with pytest.raises(BadInput, match=r"if it is new: gpuctl offers --refresh --provider aws --region mx-central-9\)"):
        check("aws", "mx-central-9")
    with pytest.raises(BadInput, match="unknown region"):
        check("aws", "somewhere", new=True)
