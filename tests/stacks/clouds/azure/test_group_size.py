"""How many machines Azure's scale set holds, and why not more (``azure_api``)."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from gpuctl.cluster.errors import GpuctlError
from gpuctl.stacks.clouds.answers import GroupSize
from gpuctl.stacks.clouds.azure.group_size import problems, resize, size, standing, verdict
from tests.fakes.azure.api import SUBSCRIPTION, Api, forbidden, recorded, refusal, serving

OUTPUTS = {"account": SUBSCRIPTION, "resource_group": "gpuctl-demo", "group": "gpuctl-demo", "region": "eastus"}
SET = "resourcegroups/gpuctl-demo/providers/microsoft.compute/virtualmachinescalesets/gpuctl-demo"
LOG = "providers/microsoft.insights/eventtypes/management/values"
NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)


@pytest.fixture
def api() -> Iterator[Api]:
    with serving(recorded("subscription") | recorded("size")) as served:
        yield served


def test_machines_are_named_as_nodes_are_and_those_that_end_are_not_among_them(api: Api) -> None:
    assert size(OUTPUTS, api.account()) == GroupSize(
        desired=4, running=1, names=("gpuctl-demo_0", "gpuctl-demo_2", "gpuctl-demo_3")
    )


def test_another_number_is_asked_for_and_nothing_else_is_changed(api: Api) -> None:
    resize(OUTPUTS, 7, api.account())
    assert [method for method, _, _ in api.asked] == ["GET", "PATCH"]  # and nobody waits for the machines
    _, path, body = api.asked[-1]
    assert path.lower().startswith(f"/subscriptions/{SUBSCRIPTION}/{SET}?")
    assert body == {"sku": {"name": "Standard_ND96asr_v4", "tier": "Standard", "capacity": 7}}


@pytest.mark.slow
def test_the_number_that_a_changed_set_is_sent_with_is_the_one_that_azure_tells_and_no_guess(api: Api) -> None:
    assert standing("gpuctl-demo", "gpuctl-demo", SUBSCRIPTION, api.account()) == 4
    api.answers[SET.replace("sets/gpuctl-demo", "sets/not-made-yet")] = refusal("ResourceNotFound", "not found", 404)
    assert standing("gpuctl-demo", "not-made-yet", SUBSCRIPTION, api.account()) == 0
    api.answers[SET] = refusal("InternalServerError", "try again", 500)
    with pytest.raises(GpuctlError, match="Azure answered 500"):
        standing("gpuctl-demo", "gpuctl-demo", SUBSCRIPTION, api.account())


def test_why_machines_do_not_come_is_told_the_newest_first(api: Api) -> None:
    assert tuple(one.message for one in problems(OUTPUTS, api.account(), NOON)) == (
        "OperationNotAllowed: Operation could not be completed as it results in exceeding approved LowPriorityCores "
        "quota.",
        "OverconstrainedAllocationRequest: Allocation failed. VM(s) with the following constraints cannot be "
        "allocated, because the condition is too restrictive.",
        "AllocationFailed: Allocation failed. We do not have sufficient capacity for the requested VM size in this "
        "region.",
        "SkuNotAvailable: The requested size is currently not available in location 'eastus'.",
    )
    (query,) = {one["$filter"] for one in api.queries(LOG) if "$filter" in one}
    assert query == (
        "eventTimestamp ge '2026-11-21T11:00:00Z' and eventTimestamp le '2026-11-21T12:00:00Z' and resourceUri eq "
        f"'/subscriptions/{SUBSCRIPTION}/resourceGroups/gpuctl-demo/providers/Microsoft.Compute"
        "/virtualMachineScaleSets/gpuctl-demo'"
    )


def test_who_may_not_read_the_log_is_told_what_the_machines_say(api: Api) -> None:
    api.answers[LOG] = forbidden("Microsoft.Insights/eventtypes/management/values/read")
    assert [one.message.partition(":")[0] for one in problems(OUTPUTS, api.account(), NOON)] == [
        "OverconstrainedAllocationRequest",
        "AllocationFailed",
    ]


def test_the_same_reason_is_told_once(api: Api) -> None:
    api.answers[LOG] *= 2
    told = problems(OUTPUTS, api.account(), NOON)
    assert len(told) == len(set(told)) == 4


def test_a_scale_set_that_is_gone_is_one_line(api: Api) -> None:
    api.answers[SET] = refusal("ResourceNotFound", "The Resource was not found.", 404)
    for ask in (size, lambda outputs, account: resize(outputs, 1, account)):
        with pytest.raises(GpuctlError, match="the scale set gpuctl-demo is gone; recreate it with `gpuctl repair`"):
            ask(OUTPUTS, api.account())


def test_a_number_that_azure_refuses_is_one_line(api: Api) -> None:
    api.answers[SET] = api.answers[SET] | {"sku": {"name": "Standard_ND96asr_v4", "capacity": 0}}
    api.by_method["PATCH"] = refusal("OperationNotAllowed", "exceeding approved\nquota", 409)
    with pytest.raises(GpuctlError, match="Azure refused: OperationNotAllowed: exceeding approved quota"):
        resize(OUTPUTS, 7, api.account())


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("AllocationFailed: Allocation failed. We do not have sufficient capacity.", "wait"),
        ("ZonalAllocationFailed: Allocation failed.", "wait"),
        ("OverconstrainedAllocationRequest: the condition is too restrictive.", "wait"),
        ("SkuNotAvailable: The requested size is currently not available in location 'eastus'.", "wait"),
        ("OperationNotAllowed: The server rejected the request because too many requests are under way.", "wait"),
        ("SomethingNew: nobody knows", "wait"),
        ("OperationNotAllowed: results in exceeding approved LowPriorityCores quota.", "stop"),
        ("OperationNotAllowed: exceeding approved Total Regional Cores Quota. Additional details", "stop"),
        ("QuotaExceeded: Operation could not be completed", "stop"),
        ("RequestDisallowedByPolicy: Resource was disallowed by policy.", "stop"),
        ("InvalidParameter: The value of parameter imageReference is invalid.", "stop"),
        ("PlatformImageNotFound: The platform image is not available.", "stop"),
        ("LinkedAuthorizationFailed: The client has permission to perform action", "stop"),
    ],
)
def test_what_waiting_does_not_change_says_so(line: str, expected: str) -> None:
    assert verdict(line) == expected


def test_a_quota_stops_and_a_lack_of_room_does_not(api: Api) -> None:
    told = {one.message.partition(":")[0]: one.verdict for one in problems(OUTPUTS, api.account(), NOON)}
    assert told == {
        "OperationNotAllowed": "stop",
        "OverconstrainedAllocationRequest": "wait",
        "AllocationFailed": "wait",
        "SkuNotAvailable": "wait",
    }


def test_what_failed_before_the_set_last_succeeded_is_over(api: Api) -> None:
    """A quota that was raised since, or a set of this name that is gone."""
    succeeded = {"eventTimestamp": "2026-11-21T11:59:20.1234567Z", "status": {"value": "Succeeded"}, "properties": {}}
    api.answers[LOG] = [*api.answers[LOG], succeeded]
    told = [one.message.partition(":")[0] for one in problems(OUTPUTS, api.account(), NOON)]
    assert told == ["OverconstrainedAllocationRequest", "AllocationFailed"], "machines that are there say so still"
