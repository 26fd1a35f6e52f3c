"""The rights of a node: read and write the cluster's own prefix, and take itself out of the cluster's own group."""

from __future__ import annotations

import json

import pulumi
from pulumi_aws import iam

from gpuctl.stacks.clouds.aws.partition import partition
from gpuctl.stacks.clouds.aws.resources.storage import Storage
from gpuctl.stacks.request.stack_request import StackRequest

_OBJECTS = ("s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload")


class Identity(pulumi.ComponentResource):
    """``profile``: the instance profile of all nodes."""

    def __init__(self, request: StackRequest, storage: Storage, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("gpuctl:aws:Identity", request.cluster, opts=opts)
        inside = pulumi.ResourceOptions(parent=self)
        trust = {"Effect": "Allow", "Principal": {"Service": "ec2.amazonaws.com"}, "Action": "sts:AssumeRole"}
        role = iam.Role(
            request.cluster,
            name_prefix=f"gpuctl-{request.cluster}-",
            assume_role_policy=json.dumps({"Version": "2012-10-17", "Statement": [trust]}),
            force_detach_policies=True,  # or a policy that was made as Pulumi was killed keeps the role for ever
            tags=request.tags(),
            opts=inside,
        )
        iam.RolePolicy(
            request.cluster,
            role=role.id,
            policy=storage.arn.apply(lambda arn: _policy(request, arn, storage.prefix)),
            opts=inside,
        )
        self.profile = iam.InstanceProfile(
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
            "Resource": f"{_arn(request, 'autoscaling', request.region)}:autoScalingGroup:*",
            "Condition": {"StringEquals": _own_group(request)},
        },
    ]
    if request.bucket:
        statements.append(_bucket_key(request, bucket, prefix))
    return json.dumps({"Version": "2012-10-17", "Statement": statements})


def _own_group(request: StackRequest) -> dict[str, str]:
    """The group's tag: its identity, since two clusters of an account may have one name."""
    tag, value = ("id", request.id) if request.id else ("cluster", request.cluster)
    return {f"autoscaling:ResourceTag/gpuctl:{tag}": value}


def _bucket_key(request: StackRequest, bucket: str, prefix: str) -> dict[str, object]:
    """A bucket that was there already may encrypt with a key of its account's (SSE-KMS). Only through S3, and only for
    the cluster's own objects, or for the bucket where it has a key of its own: docs.aws.amazon.com/AmazonS3, "Using
    server-side encryption with AWS KMS keys". What the key's own policy forbids, this does not allow."""
    region = request.place().options.get("region", request.region)
    return {
        "Sid": "BucketKey",
        "Effect": "Allow",
        "Action": ["kms:Decrypt", "kms:GenerateDataKey"],
        "Resource": f"{_arn(request, 'kms', region)}:key/*",
        "Condition": {
            "StringEquals": {"kms:ViaService": f"s3.{region}.amazonaws.com"},
            "StringLike": {"kms:EncryptionContext:aws:s3:arn": [bucket, f"{bucket}/{prefix}/*"]},
        },
    }


def _arn(request: StackRequest, service: str, region: str) -> str:
    return f"arn:{partition(region)}:{service}:{region}:{request.account or '*'}"
