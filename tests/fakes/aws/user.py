"""A user of gpuctl with an account of AWS on a moto server."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import boto3

from tests.fakes.user import User

TYPE = "g5.xlarge"


class Account(User):
    """Of AWS, on moto."""

    up_flags: Sequence[str] = ("--provider", "aws", "--type", TYPE)

    def __init__(
        self, folder: Path, endpoint: str, without: list[str], vcpus: list[int], denied: set[str] | None = None
    ) -> None:
        super().__init__(folder, {"AWS_ENDPOINT_URL": endpoint})
        self.without = without
        """Zones that give no machines."""
        self.vcpus = vcpus
        """Quotas, the last one in force."""
        self.denied = denied if denied is not None else set()
        """Calls of EC2's that the user's policies do not allow."""
        self.groups = boto3.client("autoscaling", region_name="us-east-1")

    def group(self) -> dict[str, Any]:
        """The cluster's own, by its tag."""
        ours = [{"Name": "tag:gpuctl:cluster", "Values": [self.cluster]}]
        found = self.groups.describe_auto_scaling_groups(Filters=ours)["AutoScalingGroups"]
        assert len(found) == 1, found
        return dict(found[0])

    def machines(self) -> list[str]:
        return [one["InstanceId"] for one in self.group()["Instances"]]

    def delete_bucket(self) -> None:
        bucket = boto3.resource("s3", region_name="us-east-1").Bucket(self.known().bucket.split("/")[2])
        bucket.objects.all().delete()
        bucket.delete()

    def rules(self) -> list[dict[str, Any]]:
        """Of who may reach whom."""
        ec2 = boto3.client("ec2", region_name="us-east-1")
        ours = [{"Name": "tag:gpuctl:cluster", "Values": [self.cluster]}]
        groups = [one["GroupId"] for one in ec2.describe_security_groups(Filters=ours)["SecurityGroups"]]
        of_ours = [{"Name": "group-id", "Values": groups}]
        return list(ec2.describe_security_group_rules(Filters=of_ours)["SecurityGroupRules"])
