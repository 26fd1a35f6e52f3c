"""What a node may do: read and write the cluster's own container, and (see ``group``) take machines out of the
cluster's own scale set."""

from __future__ import annotations

import pulumi
import pulumi_azure_native as azure

from gpuctl.stacks.azure import of_cluster, resource_group
from gpuctl.stacks.azure.storage import Storage
from gpuctl.stacks.request import StackRequest


class Identity(pulumi.ComponentResource):
    """``id`` and ``principal`` of the nodes' identity: Azure knows it by the one, its roles by the other."""

    def __init__(self, request: StackRequest, storage: Storage, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("gpuctl:azure:Identity", request.cluster, opts=opts)
        inside = pulumi.ResourceOptions(parent=self, depends_on=opts.depends_on if opts else None)
        identity = azure.managedidentity.UserAssignedIdentity(
            request.cluster,
            resource_name_=request.named(64),
            resource_group_name=resource_group(request),
            location=request.region,
            tags=request.tags(),
            opts=inside,
        )
        self.id, self.principal = identity.id, identity.principal_id
        azure.authorization.RoleAssignment(
            f"{request.cluster}-objects",
            scope=storage.container,
            role_definition_id=storage.role,
            principal_id=self.principal,
            principal_type=azure.authorization.PrincipalType.SERVICE_PRINCIPAL,
            description=f"nodes {of_cluster(request.cluster)} read and write its objects",
            opts=inside,
        )
        self.register_outputs({"id": self.id})
