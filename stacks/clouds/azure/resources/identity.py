"""The rights of a node: read and write the cluster's own part of its container, and (see ``group``) take machines out
of the cluster's own scale set."""

from __future__ import annotations

import pulumi
from pulumi_azure_native import authorization, managedidentity

from gpuctl.stacks.clouds.azure import of_cluster, resource_group
from gpuctl.stacks.clouds.azure.resources.storage import Storage
from gpuctl.stacks.request.stack_request import StackRequest

_BLOBS = "Microsoft.Storage/storageAccounts/blobServices/containers/blobs"


class Identity(pulumi.ComponentResource):
    """``id`` and ``principal`` of the nodes' identity: Azure knows it by the one, its roles by the other."""

    def __init__(self, request: StackRequest, storage: Storage, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("gpuctl:azure:Identity", request.cluster, opts=opts)
        inside = pulumi.ResourceOptions(parent=self, depends_on=opts.depends_on if opts else None)
        identity = managedidentity.UserAssignedIdentity(
            request.cluster,
            resource_name_=request.named(64),
            resource_group_name=resource_group(request),
            location=request.region,
            tags=request.tags(),
            opts=inside,
        )
        self.id, self.principal = identity.id, identity.principal_id
        authorization.RoleAssignment(
            f"{request.cluster}-objects",
            scope=storage.container,
            role_definition_id=storage.role,
            principal_id=self.principal,
            principal_type=authorization.PrincipalType.SERVICE_PRINCIPAL,
            description=f"nodes {of_cluster(request.cluster, request.id)} read and write its objects",
            condition=only_below(request.place().prefix),
            condition_version="2.0",
            opts=inside,
        )
        self.register_outputs({"id": self.id})


def only_below(prefix: str) -> str:
    """The condition on a role by which objects are read, written, deleted and listed below ``prefix/`` only: clusters
    may share a container. It holds for objects: whoever has the role may still delete the container as a whole, which
    is no action on data. learn.microsoft.com, "Example Azure role assignment conditions for Blob Storage": "Read or
    list blobs in named containers with a path"."""
    below = f"{prefix}/".replace("\\", "\\\\").replace("'", "\\'")
    a_list = f"ActionMatches{{'{_BLOBS}/read'}} AND SubOperationMatches{{'Blob.List'}}"
    others = [f"!(ActionMatches{{'{_BLOBS}/read'}} AND NOT SubOperationMatches{{'Blob.List'}})"]
    others += [
        f"!(ActionMatches{{'{_BLOBS}/{action}'}})" for action in ("write", "add/action", "delete", "move/action")
    ]
    return (
        f"(({' AND '.join(others)}) OR (@Resource[{_BLOBS}:path] StringStartsWith '{below}'))"
        f" AND ((!({a_list})) OR (@Request[{_BLOBS}:prefix] StringStartsWith '{below}'))"
    )
