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
        else:
            self.arn = self._made(request, place.name).arn
        self.url = pulumi.Output.from_input(request.bucket_url())
        self.register_outputs({"url": self.url})

    def _made(self, request: StackRequest, name: str) -> s3.Bucket:
        kept = pulumi.ResourceOptions(parent=self, retain_on_delete=True)
        bucket = s3.Bucket(
            request.cluster,
            bucket=name,
            tags=request.tags(),
            opts=kept,
        )
        shut = s3.BucketPublicAccessBlock(
            request.cluster,
            bucket=bucket.id,
            block_public_acls=True,
            block_public_policy=True,
            ignore_public_acls=True,
            restrict_public_buckets=True,
            opts=kept,
        )
        s3.BucketServerSideEncryptionConfiguration(
            request.cluster,
            bucket=bucket.id,
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
            bucket=bucket.id,
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
            bucket=bucket.id,
            policy=bucket.arn.apply(_tls_only),
            opts=pulumi.ResourceOptions.merge(kept, after),
        )
        return bucket


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
