"""What a node may do: read and write the cluster's own prefix, and take itself out of the cluster's own group."""

from __future__ import annotations

import json

import pulumi
import pulumi_aws as aws

from gpuctl.stacks.aws.storage import Storage
from gpuctl.stacks.request import StackRequest

_OBJECTS = ("s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload")


class Identity(pulumi.ComponentResource):
    """``profile``: the instance profile of all nodes."""

    def __init__(self, request: StackRequest, storage: Storage, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("gpuctl:aws:Identity", request.cluster, opts=opts)
        inside = pulumi.ResourceOptions(parent=self)
        trust = {"Effect": "Allow", "Principal": {"Service": "ec2.amazonaws.com"}, "Action": "sts:AssumeRole"}
        role = aws.iam.Role(
            request.cluster,
            name_prefix=f"gpuctl-{request.cluster}-",
            assume_role_policy=json.dumps({"Version": "2012-10-17", "Statement": [trust]}),
            tags=request.tags(),
            opts=inside,
        )
        aws.iam.RolePolicy(
            request.cluster,
            role=role.id,
            policy=storage.arn.apply(lambda arn: _policy(request, arn, storage.prefix)),
            opts=inside,
        )
        self.profile = aws.iam.InstanceProfile(
            request.cluster,
            name_prefix=f"gpuctl-{request.cluster}-",
            role=role.name,
            tags=request.tags(),
            opts=inside,
        )
        self.register_outputs({"profile": self.profile.name})


def _policy(request: StackRequest, bucket: str, prefix: str) -> str:
    """Describing instances or groups would take ``"Resource": "*"``, so nodes do not: what they need to know of each
    other is in the bucket."""
    statements = [
        {"Sid": "Objects", "Effect": "Allow", "Action": list(_OBJECTS), "Resource": f"{bucket}/{prefix}/*"},
        {
            "Sid": "List",
            "Effect": "Allow",
            "Action": "s3:ListBucket",
            "Resource": bucket,
            "Condition": {"StringLike": {"s3:prefix": [prefix, f"{prefix}/*"]}},
        },
        {
            "Sid": "LeaveTheGroup",
            "Effect": "Allow",
            "Action": "autoscaling:TerminateInstanceInAutoScalingGroup",
            "Resource": f"arn:aws:autoscaling:{request.region}:{request.account or '*'}:autoScalingGroup:*",
            "Condition": {"StringEquals": {"autoscaling:ResourceTag/gpuctl:cluster": request.cluster}},
        },
    ]
    return json.dumps({"Version": "2012-10-17", "Statement": statements})
