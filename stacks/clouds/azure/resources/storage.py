"""The cluster's bucket, which Azure calls a container of a storage account: private, encrypted, by TLS only. It is not
deleted with the rest, nor is its resource group: the checkpoints are in it.

Nobody gets in with the account's keys, only by role, so whoever makes the cluster gets one. What an unfinished upload
has left Azure itself discards after a week.
"""

from __future__ import annotations

import pulumi
from pulumi_azure_native import authorization, resources, storage

from gpuctl.stacks.clouds.azure import kept_resource_group, subscription
from gpuctl.stacks.clouds.azure.storage_accounts import BLOB_DATA_CONTRIBUTOR
from gpuctl.stacks.request.stack_request import BucketLocation, StackRequest


class Storage(pulumi.ComponentResource):
    """``url``, as ``storage.bucket`` takes it, ``container``, the id of what belongs to the cluster, and
    ``role``, the id of the one that reads and writes."""

    def __init__(self, request: StackRequest, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("gpuctl:azure:Storage", request.cluster, opts=opts)
        at = pulumi.Output.concat("/subscriptions/", subscription(request, self))
        self.role = pulumi.Output.concat(
            at, "/providers/Microsoft.Authorization/roleDefinitions/", BLOB_DATA_CONTRIBUTOR
        )
        place = request.place()
        if request.bucket:
            self.container = pulumi.Output.concat(
                at,
                f"/resourceGroups/{request.bucket_group or kept_resource_group(request)}",
                f"/providers/Microsoft.Storage/storageAccounts/{place.options['account_name']}",
                f"/blobServices/default/containers/{place.name}",
            )
        else:
            self.container = self._made(request, place).id
        if request.lets_in or not request.bucket:
            self._let_in(request)
        self.url = pulumi.Output.from_input(request.bucket_url())
        self.register_outputs({"url": self.url})

    def _made(self, request: StackRequest, place: BucketLocation) -> storage.BlobContainer:
        kept = pulumi.ResourceOptions(parent=self, retain_on_delete=True)
        group = resources.ResourceGroup(
            f"{request.cluster}-kept",
            resource_group_name=kept_resource_group(request),
            location=request.region,
            tags=request.tags(),
            opts=kept,
        )
        account = storage.StorageAccount(
            request.cluster,
            account_name=place.options["account_name"],
            resource_group_name=group.name,
            location=request.region,
            kind=storage.Kind.STORAGE_V2,
            sku=storage.SkuArgs(name=storage.SkuName.STANDARD_LRS),
            access_tier=storage.AccessTier.HOT,
            minimum_tls_version=storage.MinimumTlsVersion.TLS1_2,
            enable_https_traffic_only=True,
            allow_blob_public_access=False,
            allow_shared_key_access=False,
            allow_cross_tenant_replication=False,
            encryption=storage.EncryptionArgs(
                key_source=storage.KeySource.MICROSOFT_STORAGE,
                services=storage.EncryptionServicesArgs(blob=storage.EncryptionServiceArgs(enabled=True)),
            ),
            tags=request.tags(),
            opts=kept,
        )
        return storage.BlobContainer(
            request.cluster,
            container_name=place.name,
            account_name=account.name,
            resource_group_name=group.name,
            public_access=storage.PublicAccess.NONE,
            opts=kept,
        )

    def _let_in(self, request: StackRequest) -> None:
        kind, _, principal = request.reader.rpartition(":")
        if not principal:
            user = authorization.get_client_config_output(opts=pulumi.InvokeOutputOptions(parent=self))
        authorization.RoleAssignment(
            f"{request.cluster}-reader",
            scope=self.container,
            role_definition_id=self.role,
            principal_id=principal or user.object_id,
            principal_type=kind or authorization.PrincipalType.USER,
            # Whoever goes on with this cluster need not be who began it, and who began it keeps what he was given.
            opts=pulumi.ResourceOptions(
                parent=self, retain_on_delete=True, ignore_changes=["principalId", "principalType"]
            ),
        )
