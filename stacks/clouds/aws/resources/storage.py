"""The cluster's bucket: private, encrypted, by TLS only. It is not deleted with the rest: the checkpoints are in it.

It has no versions and no object lock. Trainers delete old checkpoints all the time, and each would stay and cost;
a lock would make ``down --delete-checkpoints`` fail for as long as it lasts. So what is deleted is gone. Whoever wants
otherwise names a bucket of their own (``--bucket``), or turns versions on in this one: ``kept_buckets`` deletes those
too.
"""

from __future__ import annotations

import json

import pulumi
from pulumi_aws import s3

from gpuctl.stacks.clouds.aws.partition import partition
from gpuctl.stacks.request.stack_request import StackRequest

_UNFINISHED_DAYS = 3


class Storage(pulumi.ComponentResource):
    """``url``, as ``storage.bucket`` takes it, and ``arn`` and ``prefix`` of what belongs to the cluster."""

    def __init__(self, request: StackRequest, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("gpuctl:aws:Storage", request.cluster, opts=opts)
        place = request.place()
        self.prefix = place.prefix
        if request.bucket:
            self.arn = pulumi.Output.from_input(f"arn:{partition(request.region)}:s3:::{place.name}")
            if request.is_own(request.bucket):
                # An `up` that made it may have broken off before the rest; to say it again changes nothing.
                self._guard(request, place.name)
        else:
            self._make(request, place.name)
        self.url = pulumi.Output.from_input(request.bucket_url())
        self.register_outputs({"url": self.url})

    def _make(self, request: StackRequest, name: str) -> None:
        bucket = s3.Bucket(request.cluster, bucket=name, tags=request.tags(), opts=self._kept())
        self.arn = bucket.arn
        self._guard(request, bucket.id)

    def _kept(self) -> pulumi.ResourceOptions:
        return pulumi.ResourceOptions(parent=self, retain_on_delete=True)

    def _guard(self, request: StackRequest, bucket: pulumi.Input[str]) -> None:
        """What the bucket lets happen, and to whom. ``bucket``: its name."""
        kept = self._kept()
        shut = s3.BucketPublicAccessBlock(
            request.cluster,
            bucket=bucket,
            block_public_acls=True,
            block_public_policy=True,
            ignore_public_acls=True,
            restrict_public_buckets=True,
            opts=kept,
        )
        s3.BucketServerSideEncryptionConfiguration(
            request.cluster,
            bucket=bucket,
            rules=[
                s3.BucketServerSideEncryptionConfigurationRuleArgs(
                    apply_server_side_encryption_by_default=s3.BucketServerSideEncryptionConfigurationRuleApplyServerSideEncryptionByDefaultArgs(
                        sse_algorithm="AES256"
                    )
                )
            ],
            opts=kept,
        )
        s3.BucketLifecycleConfiguration(
            request.cluster,
            bucket=bucket,
            rules=[
                s3.BucketLifecycleConfigurationRuleArgs(
                    id="unfinished uploads",
                    status="Enabled",
                    filter=s3.BucketLifecycleConfigurationRuleFilterArgs(prefix=""),
                    abort_incomplete_multipart_upload=s3.BucketLifecycleConfigurationRuleAbortIncompleteMultipartUploadArgs(
                        days_after_initiation=_UNFINISHED_DAYS
                    ),
                )
            ],
            opts=kept,
        )
        # One after the other: S3 refuses two changes of a bucket's access at once.
        after = pulumi.ResourceOptions(depends_on=[shut])
        s3.BucketPolicy(
            request.cluster,
            bucket=bucket,
            policy=self.arn.apply(_tls_only),
            opts=pulumi.ResourceOptions.merge(kept, after),
        )


def _tls_only(arn: str) -> str:
    statement = {
        "Sid": "TlsOnly",
        "Effect": "Deny",
        "Principal": "*",
        "Action": "s3:*",
        "Resource": [arn, f"{arn}/*"],
        "Condition": {"Bool": {"aws:SecureTransport": "false"}},
    }
    return json.dumps({"Version": "2012-10-17", "Statement": [statement]})
