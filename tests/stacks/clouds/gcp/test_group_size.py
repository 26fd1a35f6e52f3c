"""How many machines Google's group holds, another number of them, and why they do not come."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from gpuctl.cluster.errors import GpuctlError
from gpuctl.stacks.clouds.answers import GroupSize, LaunchProblem
from gpuctl.stacks.clouds.gcp.group_size import _entered, problems, resize, size
from gpuctl.stacks.clouds.interface import cloud
from tests.fakes.gcp.api import PROJECT, URL, Google, refusal

ZONE = "us-central1-a"
GROUP = f"zones/{ZONE}/instanceGroupManagers/gpuctl-demo"
OUTPUTS = {
    "group": "gpuctl-demo",
    "region": "us-central1",
    "zones": [ZONE],
    "account": PROJECT,
    "bucket": "gs://b/demo",
}
NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
TEMPLATE = {"name": "gpuctl-demo-1", "properties": {"machineType": "a2-highgpu-8g"}}
FULL = (
    "The zone 'projects/a-project/zones/us-central1-a' does not have enough resources available to fulfill the request."
)
QUOTA = "Quota 'PREEMPTIBLE_NVIDIA_A100_GPUS' exceeded.  Limit: 8.0 in region us-central1."


@pytest.fixture(autouse=True)
def group(project: Google) -> Iterator[Google]:
    """Four machines are wanted."""
    versions = [{"instanceTemplate": f"{URL}/global/instanceTemplates/gpuctl-demo-1"}]
    project.put(GROUP, {"name": "gpuctl-demo", "targetSize": 4, "versions": versions})
    project.put("global/instanceTemplates/gpuctl-demo-1", TEMPLATE)
    project.put(f"{GROUP}/listErrors", {})
    yield project
    _entered.cache_clear()


def machine(name: str, status: str = "RUNNING", action: str = "NONE") -> dict[str, str]:
    return {"instance": f"{URL}/zones/{ZONE}/instances/{name}", "instanceStatus": status, "currentAction": action}


def error(code: str, message: str, time: str) -> dict[str, Any]:
    details = {"action": "CREATING", "instance": f"{URL}/zones/{ZONE}/instances/gpuctl-demo-x1"}
    return {"error": {"code": code, "message": message}, "instanceActionDetails": details, "timestamp": time}


def test_what_is_wanted_and_what_there_is_are_told_apart(group: Google) -> None:
    never_made = {**machine("d", action="CREATING"), "instanceStatus": ""}
    pages = [
        {"managedInstances": [machine("b"), machine("a"), machine("c", "STAGING", "CREATING")]},
        {"managedInstances": [never_made, machine("e", action="DELETING"), machine("f")]},
    ]
    group.put(f"POST {GROUP}/listManagedInstances", pages)
    assert size(OUTPUTS) == GroupSize(desired=4, running=3, names=("a", "b", "c", "f"))


def test_the_group_is_asked_for_another_number(group: Google) -> None:
    group.put(f"POST {GROUP}/resize", {"name": "operation-1", "status": "RUNNING"})
    resize(OUTPUTS, 7)
    (asked,) = group.requests("/resize")
    assert (asked.method, asked.query["size"]) == ("POST", "7")


def test_credentials_are_found_once_however_often_it_is_asked(group: Google) -> None:
    group.put(f"POST {GROUP}/listManagedInstances", {})
    for _ in range(3):
        assert size(OUTPUTS).running == 0
        assert problems(OUTPUTS) == ()
    assert len(group.requests("/token")) == 1


def test_no_machine_at_all_can_be_asked_for(group: Google) -> None:
    group.put(f"POST {GROUP}/resize", {"name": "operation-1", "status": "DONE"})
    resize(OUTPUTS, 0)
    assert group.requests("/resize")[0].query["size"] == "0"


def test_why_machines_do_not_come_is_a_line_each_the_newest_first(group: Google) -> None:
    pages = [
        {
            "items": [
                error("QUOTA_EXCEEDED", QUOTA, "2026-11-21T11:31:00.000+00:00"),
                error("ZONE_RESOURCE_POOL_EXHAUSTED", FULL, "2026-11-21T03:40:00.000-08:00"),
            ]
        },
        {
            "items": [
                error("ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS", FULL, "2026-11-21T11:59:00Z"),
                error("ZONE_RESOURCE_POOL_EXHAUSTED", FULL, "2026-11-21T11:41:00Z"),
            ]
        },
    ]
    group.put(f"{GROUP}/listErrors", pages)
    assert problems(OUTPUTS, now=NOW) == (
        LaunchProblem(
            message="no capacity for a2-highgpu-8g in us-central1-a", verdict="wait", at="2026-11-21T11:59:00+00:00"
        ),
        LaunchProblem(
            message=f"QUOTA_EXCEEDED: {' '.join(QUOTA.split())}", verdict="stop", at="2026-11-21T11:31:00+00:00"
        ),
    )


@pytest.mark.parametrize(
    ("code", "said", "verdict"),
    [
        ("ZONE_RESOURCE_POOL_EXHAUSTED", FULL, "wait"),
        ("ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS", FULL, "wait"),
        ("RESOURCE_POOL_EXHAUSTED", FULL, "wait"),
        ("QUOTA_EXCEEDED", QUOTA, "stop"),
        ("CONDITION_NOT_MET", "Constraint constraints/compute.vmExternalIpAccess violated for project 1.", "stop"),
        ("PERMISSIONS_ERROR", "Required 'compute.images.useReadOnly' permission for 'projects/x'", "stop"),
        ("RESOURCE_NOT_FOUND", "The resource 'projects/p/global/images/mine' was not found", "stop"),
        ("INVALID_FIELD_VALUE", "Invalid value for field 'resource.disks[0].initializeParams.diskSizeGb'", "stop"),
        ("RESOURCE_NOT_FOUND", "The resource 'projects/p/zones/z/machineTypes/a2' was not found", "next zone"),
        ("INVALID_FIELD_VALUE", "Machine type a2-highgpu-8g does not exist in zone us-east1-b.", "next zone"),
        ("UNSUPPORTED_OPERATION", "Instance is not supported here", "next zone"),
        ("RESOURCE_NOT_FOUND", "The resource 'x@p.iam' of type 'serviceAccount' was not found.", "wait"),
        ("RATE_LIMIT_EXCEEDED", "Rate limit exceeded", "wait"),
        ("INTERNAL_ERROR", "Internal error. Please try again or contact Google Support.", "wait"),
        ("RESOURCE_OPERATION_RATE_EXCEEDED", "Operation rate exceeded for resource 'x'", "wait"),
    ],
)
def test_what_waiting_helps_against_is_told_apart(group: Google, code: str, said: str, verdict: str) -> None:
    group.put(f"{GROUP}/listErrors", {"items": [error(code, said, "2026-11-21T11:59:00Z")]})
    (found,) = problems(OUTPUTS, now=NOW)
    assert found.verdict == verdict


def test_what_an_older_template_was_refused_for_says_nothing(group: Google) -> None:
    """An image that was misspelt, and then was not."""
    of = {"version": {"instanceTemplate": f"{URL}/global/instanceTemplates/gpuctl-demo-0"}}
    old = error("RESOURCE_NOT_FOUND", "The resource 'projects/p/global/images/x' was not found", "2026-11-21T11:59:00Z")
    old["instanceActionDetails"] |= of
    group.put(f"{GROUP}/listErrors", {"items": [old]})
    assert problems(OUTPUTS, now=NOW) == ()


def test_what_went_wrong_long_ago_says_nothing_of_now(group: Google) -> None:
    old = error("ZONE_RESOURCE_POOL_EXHAUSTED", FULL, "2026-11-21T03:29:00.000-08:00")
    group.put(f"{GROUP}/listErrors", {"items": [old]})
    assert problems(OUTPUTS, now=NOW) == ()


def test_gpus_that_are_hung_on_a_machine_are_named(group: Google) -> None:
    hung_on = [{"acceleratorType": "nvidia-tesla-t4", "acceleratorCount": 2}]
    properties = {"machineType": "n1-standard-16", "guestAccelerators": hung_on}
    group.put("global/instanceTemplates/gpuctl-demo-1", {"properties": properties})
    full = error("ZONE_RESOURCE_POOL_EXHAUSTED", FULL, "2026-11-21T11:59:00Z")
    group.put(f"{GROUP}/listErrors", {"items": [full]})
    (found,) = problems(OUTPUTS, now=NOW)
    assert found.message == "no capacity for n1-standard-16 + 2 x nvidia-tesla-t4 in us-central1-a"


def test_a_group_that_is_gone_is_one_line() -> None:
    gone = {**OUTPUTS, "group": "gpuctl-other"}
    said = "the instance group gpuctl-other is not in us-central1-a; recreate it with `gpuctl repair`"
    for ask in (lambda: size(gone), lambda: resize(gone, 2), lambda: problems(gone)):
        with pytest.raises(GpuctlError) as refused:
            ask()
        assert str(refused.value) == said


def test_what_may_not_be_asked_is_one_line(group: Google) -> None:
    group.put(f"POST {GROUP}/resize", refusal(403, "Required 'compute.instanceGroupManagers.update' permission"))
    with pytest.raises(GpuctlError, match=r"may not do this: Required 'compute.instanceGroupManagers.update'"):
        resize(OUTPUTS, 2)


def test_the_project_is_the_stacks_own_or_else_the_one_of_the_environment(
    group: Google, monkeypatch: pytest.MonkeyPatch
) -> None:
    group.put(f"POST {GROUP}/listManagedInstances", {})
    monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "another")
    google = cloud("gcp")
    assert google.account("us-central1") == "another"
    assert google.size(OUTPUTS).desired == 4
    with pytest.raises(GpuctlError, match="is not in us-central1-a"):
        google.size({**OUTPUTS, "account": ""})
