"""Microsoft Azure: a Uniform scale set of Spot machines, in one placement group.

InfiniBand is there between ND sizes only, and only within that placement group. NC A100 v4 and NCads H100 v5 have none:
NCCL goes over TCP between them. The image brings the drivers; nothing else need be asked for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from gpuctl.stacks.catalog.instance_types import MachineType
from gpuctl.stacks.clouds.answers import KeptBucket
from gpuctl.stacks.clouds.interface import HOURS_A_MONTH, Cloud, Extra
from gpuctl.stacks.request.stack_request import StackRequest

if TYPE_CHECKING:
    import pulumi

PUBLIC_ADDRESS_USD_PER_HOUR = 0.005
"""Standard, static, as scale sets have them; not looked up: see azure.microsoft.com/pricing/details/ip-addresses."""
PREMIUM_USD_PER_MONTH = {32: 5.28, 64: 10.21, 128: 19.71, 256: 38.01, 512: 73.22, 1024: 135.17}
"""Of a premium SSD of up to so many GB (P4 to P30), eastus; not looked up: see azure.microsoft.com/pricing/details/
managed-disks. Machines have one."""
_OF_CLUSTER = re.compile(r"of the gpuctl cluster ([a-z][a-z0-9-]*)(?: \(([0-9a-f]{10})\))?")


class Azure(Cloud):
    name = "azure"
    user_data_bytes = 65_535
    """``customData`` before base64."""

    def program(self, request: StackRequest, machine: MachineType) -> Mapping[str, object]:
        import pulumi
        from pulumi_azure_native import resources
        from pulumi_azure_native.provider import Provider

        from gpuctl.stacks.clouds.azure.client import pulumi_has_a_log_in
        from gpuctl.stacks.clouds.azure.resources.group import Group
        from gpuctl.stacks.clouds.azure.resources.identity import Identity
        from gpuctl.stacks.clouds.azure.resources.network import Network
        from gpuctl.stacks.clouds.azure.resources.storage import Storage

        # Not the default one, which would go by the environment. Of all log-ins it takes only az's by itself.
        provider = Provider(
            request.cluster,
            subscription_id=request.account or None,
            location=request.region,
            use_default_azure_credential=None if pulumi_has_a_log_in() else True,
        )
        there = pulumi.ResourceOptions(providers=[provider])
        home = resources.ResourceGroup(
            request.cluster,
            resource_group_name=resource_group(request),
            location=request.region,
            tags=request.tags(),
            opts=pulumi.ResourceOptions(provider=provider),
        )
        # What is in the resource group gives its name only, and so must be told to wait for it.
        inside = pulumi.ResourceOptions(providers=[provider], depends_on=[home])
        network = Network(request, machine, inside)
        storage = Storage(request, there)
        identity = Identity(request, storage, inside)
        group = Group(request, machine, network, identity, inside)
        return {
            "bucket": storage.url,
            "group": group.group.name,
            "region": request.region,
            "zones": list(request.zones),
            "account": request.account,
            "resource_group": home.name,
        }

    def node_env(self, request: StackRequest) -> Mapping[str, str]:
        """Variables that tell which identity is meant: a policy may have given the machines another one besides, and
        the metadata service refuses to choose (Azure, "How to use managed identities on a VM to acquire an access
        token")."""
        if not request.account:
            return {}
        group = f"/subscriptions/{request.account}/resourceGroups/{resource_group(request)}"
        kind = "providers/Microsoft.ManagedIdentity/userAssignedIdentities"
        return {"AZURE_MSI_RESOURCE_ID": f"{group}/{kind}/{request.named(64)}"}

    def reader(self) -> str:
        return str(self._module("client").reader())

    def bucket_group(self, request: StackRequest) -> str:
        return str(self._module("storage_accounts").bucket_group(request))

    def unread_buckets(self, request: StackRequest) -> Sequence[KeptBucket]:
        return self.kept_buckets([request.region], request.cluster)

    def may_read(self, request: StackRequest, bucket: KeptBucket) -> bool:
        return bool(self._module("storage_accounts").may_read(request, bucket))

    def extras(self, request: StackRequest, machine: MachineType) -> Sequence[Extra]:
        del machine
        month = next((usd for gb, usd in PREMIUM_USD_PER_MONTH.items() if request.disk_gb <= gb), 0.0)
        return [
            Extra("disks", month / HOURS_A_MONTH * request.nodes_max),
            Extra("public addresses", PUBLIC_ADDRESS_USD_PER_HOUR * request.nodes_max),
        ]

    def zones(self, request: StackRequest) -> Sequence[str]:  # noqa: ARG002
        """A region is one place to Azure, which chooses the zone if none is named."""
        return ()


def resource_group(request: StackRequest) -> str:
    """The name of the resource group with all that ``down`` takes away."""
    return request.named(80)


def kept_resource_group(request: StackRequest) -> str:
    """The name of the bucket's resource group: to delete a resource group is to delete all that is in it."""
    return kept_group(request.cluster, request.region)


def kept_group(cluster: str, region: str) -> str:
    """Its name, by which ``leaks`` knows it; a cluster's tag is on it like on all else. A group stays in its region,
    and a cluster may come back in another one."""
    return f"gpuctl-{cluster}-{region}-kept"


def of_cluster(cluster: str, id_: str = "") -> str:
    """The words by which a role, and what a node is given, tell whom they are for: they take no tags."""
    return f"of the gpuctl cluster {cluster}" + (f" ({id_})" if id_ else "")


def whose(text: str) -> str:
    """The cluster in words with ``of_cluster`` in them; empty: there is none."""
    found = _OF_CLUSTER.search(text)
    return found.group(1) if found else ""


def whose_id(text: str) -> str:
    """The identity of that cluster; empty: the words do not tell it."""
    found = _OF_CLUSTER.search(text)
    return (found.group(2) or "") if found else ""


def subscription(request: StackRequest, parent: pulumi.Resource) -> pulumi.Input[str]:
    """The one asked for, else the one that the user's credentials belong to."""
    if request.account:
        return request.account
    import pulumi
    from pulumi_azure_native import authorization

    return authorization.get_client_config_output(opts=pulumi.InvokeOutputOptions(parent=parent)).subscription_id


CLOUD = Azure()
