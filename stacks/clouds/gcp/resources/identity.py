"""The rights of a node: read and write the cluster's own prefix, list its bucket, and take itself out of its own group.

A condition can name a bucket's objects, but no instance group: Compute Engine knows names in conditions for machines,
disks and templates only. What it knows of a group is its tag, so the group carries one that nothing else has.
"""

from __future__ import annotations

import pulumi
from pulumi_gcp import projects, serviceaccount, tags
from pulumi_gcp import storage as gcs

from gpuctl.stacks.clouds.gcp import project
from gpuctl.stacks.clouds.gcp.ownership import described, named
from gpuctl.stacks.clouds.gcp.resources.storage import Storage
from gpuctl.stacks.request.stack_request import StackRequest

_LEAVE = ("compute.instanceGroupManagers.get", "compute.instanceGroupManagers.update")
"""``instanceGroupManagers.deleteInstances`` asks for the second; the first tells who belongs to the group. The second
is all that ``resize`` asks for, too, and there is none that is narrower: a node can make its group larger
(docs/internals/security.md)."""


class Identity(pulumi.ComponentResource):
    """``email`` of the nodes' service account, and ``tags`` for the group, by which it is known as theirs."""

    def __init__(self, request: StackRequest, storage: Storage, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("gpuctl:gcp:Identity", request.cluster, opts=opts)
        self._inside = pulumi.ResourceOptions(parent=self)
        account = serviceaccount.Account(
            request.cluster,
            account_id=request.named(30),
            display_name=named(request, "nodes of the"),
            opts=self._inside,
        )
        self.email = account.email
        self._member = pulumi.Output.concat("serviceAccount:", account.email)
        self._read_and_write(request, storage)
        self._leave_the_group(request)
        self.register_outputs({"email": self.email})

    def _read_and_write(self, request: StackRequest, storage: Storage) -> None:
        objects = pulumi.Output.concat("projects/_/buckets/", storage.name, "/objects/", storage.prefix, "/")
        gcs.BucketIAMMember(
            f"{request.cluster}-objects",
            bucket=storage.name,
            role="roles/storage.objectUser",
            member=self._member,
            condition=gcs.BucketIAMMemberConditionArgs(
                title="own prefix", expression=pulumi.Output.concat('resource.name.startsWith("', objects, '")')
            ),
            opts=self._inside,
        )
        # A list is asked of the bucket, which no prefix matches; it shows names and no content.
        gcs.BucketIAMMember(
            f"{request.cluster}-list",
            bucket=storage.name,
            role="roles/storage.legacyBucketReader",
            member=self._member,
            opts=self._inside,
        )

    def _leave_the_group(self, request: StackRequest) -> None:
        at = project(request, self)
        # Google gives the project back by its number.
        known = pulumi.ResourceOptions.merge(self._inside, pulumi.ResourceOptions(ignore_changes=["parent"]))
        key = tags.TagKey(
            request.cluster,
            parent=pulumi.Output.concat("projects/", at),
            short_name=request.named(63),
            description=described(request, "marks what belongs to the"),
            opts=known,
        )
        value = tags.TagValue(request.cluster, parent=key.id, short_name="yes", opts=self._inside)
        self.tags = pulumi.Output.all(key.id, value.id).apply(lambda ids: {ids[0]: ids[1]})
        role = projects.IAMCustomRole(
            request.cluster,
            project=at,
            role_id=_role_id(request),
            title=named(request, "leave the group of the"),
            permissions=list(_LEAVE),
            opts=self._inside,
        )
        projects.IAMMember(
            request.cluster,
            project=at,
            role=role.name,
            member=self._member,
            condition=projects.IAMMemberConditionArgs(
                title="own group",
                description=described(request, "leave the group of the"),
                expression=pulumi.Output.concat('resource.matchTagId("', key.id, '", "', value.id, '")'),
            ),
            opts=self._inside,
        )


def _role_id(request: StackRequest) -> str:
    """The role's id, with the day that the cluster was made: a role's id is taken for 37 days after the role was
    deleted, of which it can be brought back in the first seven alone (cloud.google.com/iam/docs/creating-custom-roles).
    """
    return f"{request.named(55)}_{request.created}".replace("-", "_").rstrip("_")
