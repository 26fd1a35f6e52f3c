"""The machines: a Uniform scale set, which tries to restore those that are taken.

Nothing here waits for machines, and nothing fights their number. A new set is empty: ``up`` asks for machines once all
of this exists and what they fetch lies in the bucket, and a node that was idle shrinks the set itself. What the set
does not restore, ``repair`` does.

The number is not left out of what is sent, as elsewhere: Pulumi's provider sends all of a set whenever something of it
has changed, and what Pulumi ignores is then the number of its state, by which a set of machines that train would be
emptied (docs/decisions/0013-an-empty-group-first.md).
"""

from __future__ import annotations

import base64

import pulumi
from pulumi_azure_native import authorization, compute

from gpuctl.stacks.catalog.instance_types import MachineType
from gpuctl.stacks.clouds.azure import of_cluster, resource_group, subscription
from gpuctl.stacks.clouds.azure.group_size import standing
from gpuctl.stacks.clouds.azure.images import LATEST, image, newest
from gpuctl.stacks.clouds.azure.resources.identity import Identity
from gpuctl.stacks.clouds.azure.resources.network import Network
from gpuctl.stacks.clouds.interface import LATER
from gpuctl.stacks.clouds.user_data import compressed
from gpuctl.stacks.request.stack_request import StackRequest

_IMAGE = "microsoft-dsvm:ubuntu-hpc:2404:latest"
_USER = "ubuntu"
_TRY_TO_RESTORE = "PT1H"
_IMAGE_PATH = "virtualMachineProfile.storageProfile.imageReference"
_LEAVE = (
    "Microsoft.Compute/virtualMachineScaleSets/read",
    "Microsoft.Compute/virtualMachineScaleSets/delete/action",
)
"""``delete/action`` deletes instances; the right to delete the set itself is called ``delete``."""


class Group(pulumi.ComponentResource):
    """The machines of a cluster. ``group``: the scale set.

    Args:
        request: the whole cluster; how many machines the set has now is asked of Azure.
        machine: the catalog's entry for the request's type.
        network: holds the subnet that the machines are in.
        identity: holds the managed identity by which the machines have their rights.
        opts: Pulumi's options of the component: its provider, and the resource group to wait for.
    """

    def __init__(
        self,
        request: StackRequest,
        machine: MachineType,
        network: Network,
        identity: Identity,
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        super().__init__("gpuctl:azure:Group", request.cluster, opts=opts)
        self._request = request
        self._machine = machine
        self._inside = pulumi.ResourceOptions(parent=self)
        self.group = compute.VirtualMachineScaleSet(
            request.cluster,
            vm_scale_set_name=request.named(64),
            resource_group_name=resource_group(request),
            location=request.region,
            zones=list(request.zones) or None,
            sku=compute.SkuArgs(name=machine.name, tier="Standard", capacity=self._standing(network, identity)),
            orchestration_mode=compute.OrchestrationMode.UNIFORM,
            single_placement_group=request.placement,
            overprovision=False,  # more machines than asked for, for a while
            upgrade_policy=compute.UpgradePolicyArgs(mode=compute.UpgradeMode.MANUAL),
            spot_restore_policy=compute.SpotRestorePolicyArgs(enabled=True, restore_timeout=_TRY_TO_RESTORE)
            if request.spot
            else None,
            identity=compute.VirtualMachineScaleSetIdentityArgs(
                type=compute.ResourceIdentityType.USER_ASSIGNED, user_assigned_identities=[identity.id]
            ),
            virtual_machine_profile=self._machines(network),
            tags=request.tags(),
            # A machine that starts finds its way out and its rights there, and they are there until it has ended. The
            # image is looked up once: else each `up` would take a newer one, for new machines only.
            opts=pulumi.ResourceOptions(
                parent=self,
                depends_on=[network, identity],
                ignore_changes=[] if request.image else [_IMAGE_PATH],
            ),
        )
        self._let_leave(identity)
        self.register_outputs({"group": self.group.name})

    def _standing(self, network: Network, identity: Identity) -> pulumi.Output[int]:
        """The number of machines that the set is to have now. Azure is asked when what the set waits for is there: as
        late as can be before the set is sent."""
        user = authorization.get_client_config_output(opts=pulumi.InvokeOutputOptions(parent=self))
        where = resource_group(self._request), self._request.named(64)
        return pulumi.Output.all(user.subscription_id, network.subnets[0].id, identity.id).apply(
            lambda known: 0 if known[0] == LATER else standing(*where, subscription=known[0])
        )

    def _machines(self, network: Network) -> compute.VirtualMachineScaleSetVMProfileArgs:
        return compute.VirtualMachineScaleSetVMProfileArgs(
            priority=compute.VirtualMachinePriorityTypes.SPOT if self._request.spot else None,
            # Deallocate would go on to cost for the disks.
            eviction_policy=compute.VirtualMachineEvictionPolicyTypes.DELETE if self._request.spot else None,
            billing_profile=compute.BillingProfileArgs(max_price=-1) if self._request.spot else None,
            os_profile=self._login(),
            storage_profile=compute.VirtualMachineScaleSetStorageProfileArgs(
                image_reference=self._image(),
                os_disk=compute.VirtualMachineScaleSetOSDiskArgs(
                    create_option=compute.DiskCreateOptionTypes.FROM_IMAGE,
                    caching=compute.CachingTypes.READ_WRITE,
                    disk_size_gb=self._request.disk_gb,
                    managed_disk=compute.VirtualMachineScaleSetManagedDiskParametersArgs(
                        storage_account_type=compute.StorageAccountTypes.PREMIUM_LRS
                    ),
                ),
            ),
            network_profile=compute.VirtualMachineScaleSetNetworkProfileArgs(
                network_interface_configurations=[_card(network)]
            ),
        )

    def _login(self) -> compute.VirtualMachineScaleSetOSProfileArgs:
        keys = [
            compute.SshPublicKeyArgs(key_data=key, path=f"/home/{_USER}/.ssh/authorized_keys")
            for key in [self._request.ssh_key]
            if key
        ]
        return compute.VirtualMachineScaleSetOSProfileArgs(
            computer_name_prefix=self._request.cluster,
            admin_username=_USER,
            custom_data=base64.b64encode(compressed(self._request.user_data)).decode(),
            linux_configuration=compute.LinuxConfigurationArgs(
                disable_password_authentication=True, ssh=compute.SshConfigurationArgs(public_keys=keys)
            ),
        )

    def _image(self) -> compute.ImageReferenceArgs:
        wanted = image(self._request.image or _IMAGE)
        version: pulumi.Input[str] = wanted.version
        if version == LATEST:
            user = authorization.get_client_config_output(opts=pulumi.InvokeOutputOptions(parent=self))
            version = user.subscription_id.apply(lambda known: newest(wanted, self._request.region, known))
        return compute.ImageReferenceArgs(
            publisher=wanted.publisher, offer=wanted.offer, sku=wanted.sku, version=version
        )

    def _let_leave(self, identity: Identity) -> None:
        """A node deletes its instance, and by that the set's capacity: a role of one right, and on this set only."""
        home = pulumi.Output.concat(
            "/subscriptions/", subscription(self._request, self), f"/resourceGroups/{resource_group(self._request)}"
        )
        whose = of_cluster(self._request.cluster, self._request.id)
        role = authorization.RoleDefinition(
            self._request.cluster,
            # All of a tenant's roles have names of their own.
            role_name=f"leave the scale set {whose}, {self._request.mark()}",
            description="Nodes take themselves out when they are idle",
            role_type="CustomRole",
            scope=home,
            assignable_scopes=[home],
            permissions=[authorization.PermissionArgs(actions=list(_LEAVE))],
            opts=pulumi.ResourceOptions(parent=self, depends_on=[self.group]),  # and so in its resource group
        )
        authorization.RoleAssignment(
            f"{self._request.cluster}-leave",
            scope=self.group.id,
            role_definition_id=role.id,
            principal_id=identity.principal,
            principal_type=authorization.PrincipalType.SERVICE_PRINCIPAL,
            description=f"nodes {whose} leave it",
            opts=self._inside,
        )


def _card(network: Network) -> compute.VirtualMachineScaleSetNetworkConfigurationArgs:
    return compute.VirtualMachineScaleSetNetworkConfigurationArgs(
        name="card",
        primary=True,
        enable_accelerated_networking=True,
        ip_configurations=[
            compute.VirtualMachineScaleSetIPConfigurationArgs(
                name="address",
                primary=True,
                subnet=compute.ApiEntityReferenceArgs(id=network.subnets[0].id),
                public_ip_address_configuration=compute.VirtualMachineScaleSetPublicIPAddressConfigurationArgs(
                    name="public",
                    # Without it Azure takes Basic, which it no longer sells. Its reference says "only Flexible", its
                    # page on scale sets' networks does not: "without a load balancer, the SKU of the instance IPs can
                    # be set directly" (learn.microsoft.com, "Networking for Azure Virtual Machine Scale Sets").
                    sku=compute.PublicIPAddressSkuArgs(name=compute.PublicIPAddressSkuName.STANDARD),
                    delete_option=compute.DeleteOptions.DELETE,
                ),
            )
        ],
    )
