"""Zones of Google Cloud, the best first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from gpuctl.cluster.errors import GpuctlError
from gpuctl.stacks.clouds.gcp.zones import zones
from gpuctl.stacks.clouds.interface import cloud
from tests.fakes.gcp.api import PROJECT, Google, refusal
from tests.fakes.requests import asked

ADVICE = "POST regions/us-central1/advice/capacity"
SCORES = {"zones/us-central1-a": 0.25, "zones/us-central1-b": 0.5, "zones/us-central1-f": 0.75}


@pytest.fixture(autouse=True)
def three_zones(project: Google) -> Google:
    """And one elsewhere; of them Google tells scores."""
    places = (*SCORES, "zones/europe-west4-a")
    project.put_everywhere("machineTypes", {place: [{"name": "a2-highgpu-8g"}] for place in places})
    project.put(ADVICE, _advice)
    return project


def _advice(body: Any) -> Any:
    (zone,) = body["distributionPolicy"]["zones"]
    shards = [{"instanceCount": 4, "provisioningModel": "SPOT", "zone": zone["zone"]}]
    return {
        "recommendations": [
            {"scores": {"obtainability": SCORES[zone["zone"].removeprefix(f"projects/{PROJECT}/")]}, "shards": shards}
        ]
    }


def test_the_likeliest_zone_comes_first(three_zones: Google) -> None:
    assert zones(asked("gcp")) == ("us-central1-f", "us-central1-b", "us-central1-a")
    body = three_zones.requests("/capacity")[0].body
    assert body["size"] == 4
    assert body["instanceProperties"] == {"scheduling": {"provisioningModel": "SPOT"}}
    assert body["instanceFlexibilityPolicy"]["instanceSelections"] == {"machine": {"machineTypes": ["a2-highgpu-8g"]}}


def test_a_zone_that_google_scores_not_comes_last_and_all_may_be_so(three_zones: Google) -> None:
    def shy(body: Any) -> Any:
        told = _advice(body)
        return {} if "us-central1-f" in str(told) else told

    three_zones.put(ADVICE, shy)
    assert zones(asked("gcp")) == ("us-central1-b", "us-central1-a", "us-central1-f")
    three_zones.put(ADVICE, refusal(403, "Required 'compute.advice.capacity' permission"))
    assert zones(asked("gcp")) == ("us-central1-a", "us-central1-b", "us-central1-f")


def test_machines_on_demand_have_no_scores(three_zones: Google) -> None:
    assert zones(asked("gcp", spot=False)) == ("us-central1-a", "us-central1-b", "us-central1-f")
    assert three_zones.requests("/capacity") == []


def test_a_zone_has_to_have_the_gpus_that_are_hung_on_too(three_zones: Google) -> None:
    three_zones.put_everywhere("machineTypes", {place: [{"name": "n1-standard-16"}] for place in SCORES})
    here: dict[str, Sequence[Any]] = {place: [{"name": "nvidia-tesla-t4"}] for place in list(SCORES)[1:]}
    three_zones.put_everywhere("acceleratorTypes", here)
    assert zones(asked("gcp", type="n1-standard-16+t4x2")) == ("us-central1-f", "us-central1-b")
    (selection,) = three_zones.requests("/capacity")[0].body["instanceFlexibilityPolicy"]["instanceSelections"].values()
    assert selection["guestAccelerators"] == [{"acceleratorType": "nvidia-tesla-t4", "acceleratorCount": 2}]


def test_a_region_without_the_type_has_no_zone() -> None:
    google = cloud("gcp")
    assert google.zones(asked("gcp", region="asia-east1", zones=("asia-east1-a",))) == ()


def test_what_may_not_be_asked_is_one_line(three_zones: Google) -> None:
    three_zones.put("aggregated/machineTypes", refusal(403, "Required 'compute.machineTypes.list' permission"))
    with pytest.raises(GpuctlError, match=r"may not do this: Required 'compute.machineTypes.list'"):
        zones(asked("gcp"))
