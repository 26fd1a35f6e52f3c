"""Why machines do not come, on AWS: activities as Auto Scaling tells them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from gpuctl.stacks.clouds.aws.group_size import problems
from gpuctl.stacks.clouds.aws.launch_errors import verdict
from tests.fakes.aws.recorded import answering

pytestmark = pytest.mark.usefixtures("aws_account")

OUTPUTS = {"group": "gpuctl-demo-1", "region": "us-east-1"}
SPOT = "Could not launch Spot Instances. UnfulfillableCapacity - Unable to fulfill capacity due to your request"


def activity(message: str, ago: timedelta, status: str = "Failed") -> str:
    started = (datetime.now(UTC) - ago).isoformat()
    said = f"<StatusMessage>{message}</StatusMessage>" if message else ""
    return (
        f"<member><ActivityId>1</ActivityId><StatusCode>{status}</StatusCode><StartTime>{started}</StartTime>"
        f"{said}</member>"
    )


def told(*activities: str, group: str = "gpuctl-demo-1") -> list[str]:
    body = (
        '<R xmlns="http://autoscaling.amazonaws.com/doc/2011-01-01/"><DescribeScalingActivitiesResult><Activities>'
        f"{''.join(activities)}</Activities></DescribeScalingActivitiesResult></R>"
    )
    found = problems(OUTPUTS | {"group": group}, answering({("autoscaling", "DescribeScalingActivities"): body}))
    return [one.message for one in found]


def test_what_failed_now_is_told_once_with_its_verdict() -> None:
    assert told(activity(SPOT, timedelta(minutes=1)), activity(SPOT, timedelta(minutes=3))) == [SPOT]


def test_a_machine_that_ended_while_it_started_is_told() -> None:
    said = "Instance became unhealthy while waiting for instance to be in InService state. Termination Reason: "
    said += "Client.InternalError: Client error on launch"
    ago = timedelta(minutes=1)
    assert told(activity(said, ago, "Cancelled"), activity("", ago, "Cancelled"), activity("", ago, "Successful")) == [
        said
    ]


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        (f"{SPOT} configuration. Please adjust your request and try again. Launching EC2 instance failed.", "wait"),
        (
            "Could not launch Spot Instances. InsufficientInstanceCapacity - There is no Spot capacity available that "
            "matches your request. Launching EC2 instance failed.",
            "wait",
        ),
        (
            "We currently do not have sufficient p4d.24xlarge capacity in the Availability Zone you requested "
            "(us-east-1a). Our system will be working on provisioning additional capacity.",
            "wait",
        ),
        (
            "Could not launch Spot Instances. InvalidFleetConfiguration - Your requested instance type (p3.8xlarge) is "
            "not supported in your requested Availability Zone (us-east-2c). Launching EC2 instance failed.",
            "next zone",
        ),
        ("The requested configuration is currently not supported. Please check the documentation", "next zone"),
        ("Max spot instance count exceeded. Launching EC2 instance failed.", "stop"),
        ("Could not launch Spot Instances. MaxSpotInstanceCountExceeded - Max spot instance count exceeded", "stop"),
        (
            "You have requested more vCPU capacity than your current vCPU limit of 0 allows for the instance bucket "
            "that the specified instance type belongs to.",
            "stop",
        ),
        ("The key pair 'gpuctl-x' does not exist. Launching EC2 instance failed.", "stop"),
        ("The image id '[ami-1]' does not exist. InvalidAMIID.NotFound", "stop"),
        ("The AMI ID ami-1 does not exist. Launching EC2 instance failed.", "stop"),
        ("Client.InternalError: Client error on launch", "stop"),
        ("Client.InvalidKMSKey.InvalidState: The KMS key provided is in an incorrect state", "stop"),
        ("You are not authorized to perform this operation. Encoded authorization failure message: x", "stop"),
        (
            "AuthFailure.ServiceLinkedRoleCreationNotPermitted - The provided credentials do not have permission to "
            "create the service-linked role for EC2 Spot Instances.",
            "stop",
        ),
        ("The snapshot 'snap-1' does not exist. Launching EC2 instance failed.", "stop"),
        ("InvalidParameterValue - Value (x) for parameter groupId is invalid.", "stop"),
        (
            "InvalidParameterValue - Value (gpuctl-x) for parameter iamInstanceProfile.name is invalid. Invalid IAM "
            "Instance Profile name",
            "wait",
        ),
        ("Server.InternalError: Internal error on launch", "wait"),
    ],
)
def test_awss_reasons_mean_wait_next_zone_or_stop(reason: str, expected: str) -> None:
    assert verdict(reason) == expected
