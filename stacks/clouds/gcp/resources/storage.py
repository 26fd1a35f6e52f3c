"""The cluster's bucket: private and encrypted. It is not deleted with the rest: the checkpoints are in it.

Google has no rule for TLS on a bucket, only one on a whole organisation (``storage.secureHttpTransport``); every URL
of ours is https. Soft deletion is off: a checkpoint that was swept would be paid for another week. So a checkpoint that
is deleted, by a job too, does not come back.
"""

from __future__ import annotations

import pulumi
from pulumi_gcp import storage

from gpuctl.stacks.clouds.gcp import labels
from gpuctl.stacks.request.stack_request import StackRequest

_UNFINISHED_DAYS = 3


class Storage(pulumi.ComponentResource):
    """``url``, as ``storage.bucket`` takes it, and ``name`` and ``prefix`` of what belongs to the cluster."""

    def __init__(self, request: StackRequest, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("gpuctl:gcp:Storage", request.cluster, opts=opts)
        place = request.place()
        self.prefix = place.prefix
        self.name = pulumi.Output.from_input(place.name) if request.bucket else self._made(request, place.name).name
        self.url = pulumi.Output.from_input(request.bucket_url())
        self.register_outputs({"url": self.url})

    def _made(self, request: StackRequest, name: str) -> storage.Bucket:
        return storage.Bucket(
            request.cluster,
            name=name,
            location=request.region.upper(),
            uniform_bucket_level_access=True,
            public_access_prevention="enforced",
            soft_delete_policy=storage.BucketSoftDeletePolicyArgs(retention_duration_seconds=0),
            lifecycle_rules=[
                storage.BucketLifecycleRuleArgs(
                    action=storage.BucketLifecycleRuleActionArgs(type="AbortIncompleteMultipartUpload"),
                    condition=storage.BucketLifecycleRuleConditionArgs(age=_UNFINISHED_DAYS),
                )
            ],
            labels=labels(request),
            opts=pulumi.ResourceOptions(parent=self, retain_on_delete=True),
        )
