"""Which refusals end by themselves, by what clouds have really said."""

from __future__ import annotations

import pytest

from gpuctl.stacks.clouds.eventual import is_eventual
from tests.fakes.azure.api import SUBSCRIPTION
from tests.fakes.azure.cloud import ROOT, Subscription


@pytest.mark.parametrize(
    "said",
    [
        'Status=404 Code="RoleDefinitionDoesNotExist" Message="The specified role definition with ID '
        "'5a0d3c1e' does not exist.\"",
        'Status=400 Code="PrincipalNotFound" Message="Principal 0a1b2c3d does not exist in the directory 4e5f. '
        'Check that you have the correct principal ID."',
        "creating Auto Scaling Group: ValidationError: You must use a valid fully-formed launch template. "
        "Value (gpuctl-demo) for parameter iamInstanceProfile.name is invalid. Invalid IAM Instance Profile name",
        "InvalidParameterValue: Value (gpuctl-demo-abc) for parameter iamInstanceProfile.name is invalid.",
        "googleapi: Error 400: Service account gpuctl-demo@project.iam.gserviceaccount.com does not exist., badRequest",
    ],
)
def test_what_was_made_a_moment_ago_is_tried_again(said: str) -> None:
    assert is_eventual(said)


@pytest.mark.parametrize(
    "said",
    [
        'Status=403 Code="AuthorizationFailed" Message="The client does not have authorization"',
        'Status=409 Code="OperationNotAllowed" Message="exceeding approved LowPriorityCores quota"',
        'Status=404 Code="ResourceGroupNotFound" Message="Resource group gpuctl-demo could not be found."',
        "InvalidParameterValue: Value (p4d.24xlarge) for parameter instanceType is invalid.",
        "VpcLimitExceeded: The maximum number of VPCs has been reached.",
        "",
    ],
)
def test_what_stays_as_it_is_is_not(said: str) -> None:
    assert not is_eventual(said)


def test_the_stand_in_for_azure_says_it_as_often_as_it_is_told() -> None:
    """So that what tries again can be tested end to end."""
    there = Subscription()
    there.unheard_of = 2
    group = there.put("resourceGroups/gpuctl-demo", location="eastus")
    roles = f"{ROOT}/providers/Microsoft.Authorization"
    there.live("PUT", f"{roles}/roleDefinitions/leave", {"properties": {"roleName": "leave", "type": "CustomRole"}})
    given = {"scope": group, "principalId": SUBSCRIPTION, "roleDefinitionId": f"{roles}/roleDefinitions/leave"}
    path = f"{group}/providers/Microsoft.Authorization/roleAssignments/given"
    answers = [there.live("PUT", path, {"properties": given}) for _ in range(3)]
    refused = [answer[1]["error"] for answer in answers[:2]]
    assert all(is_eventual(f"Code={one['code']}") and is_eventual(one["message"]) for one in refused)
    assert answers[2]["id"] == path
