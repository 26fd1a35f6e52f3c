"""The machines: an instance template, and a zonal group that replaces those which are taken.

Nothing here waits for machines, and nothing fights their number. A new group is empty: ``up`` asks for machines once
all of this exists and what they fetch lies in the bucket, and a node that was idle shrinks the group itself.
"""

from __future__ import annotations

import base64

import pulumi
from pulumi_gcp import compute

from gpuctl.stacks.catalog.instance_types import MachineType
from gpuctl.stacks.clouds.gcp import NOTICE_S, disk_type, is_placed, labels, shape
from gpuctl.stacks.clouds.gcp.ownership import described
from gpuctl.stacks.clouds.gcp.resources.identity import Identity
from gpuctl.stacks.clouds.gcp.resources.network import Network
from gpuctl.stacks.clouds.user_data import compressed
from gpuctl.stacks.request.stack_request import StackRequest

_IMAGES = "ubuntu-os-accelerator-images"
FAMILY = "ubuntu-accelerator-2404-amd64-with-nvidia-580"


class Group(pulumi.ComponentResource):
    """The machines of a cluster. ``group``: the managed instance group.

    Args:
        request: the whole cluster, in the first of its zones; the group is made empty.
        machine: the catalog's entry for the request's type.
        network: holds the subnet that the machines are in, and the tag by which its firewall rules know them.
        identity: holds the service account of the machines, and the tag by which the group is known as theirs.
        opts: Pulumi's options of the component, such as its provider.
    """

    def __init__(
        self,
        request: StackRequest,
        machine: MachineType,
        network: Network,
        identity: Identity,
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        super().__init__("gpuctl:gcp:Group", request.cluster, opts=opts)
        self._request = request
        self._machine = machine
        self._described_once = pulumi.ResourceOptions(parent=self, ignore_changes=["description"])
        placed = is_placed(request, machine)
        # In a group, eight H100s are placed by the group's policy, and all others by the machines'.
        by_group = placed and machine.family == "a3-highgpu" and machine.gpus == 8
        template = self._template(network, identity, self._compact() if placed and not by_group else None)
        self.group = compute.InstanceGroupManager(
            request.cluster,
            name=request.named(63),
            description=described(request, "nodes of the"),
            zone=request.zones[0],
            base_instance_name=request.named(58),
            versions=[compute.InstanceGroupManagerVersionArgs(instance_template=template.self_link)],
            target_size=0,
            resource_policies=compute.InstanceGroupManagerResourcePoliciesArgs(
                workload_policy=self._throughput().self_link
            )
            if by_group
            else None,
            # A new template is for machines to come: those that run go on.
            update_policy=compute.InstanceGroupManagerUpdatePolicyArgs(type="OPPORTUNISTIC", minimal_action="REPLACE"),
            params=compute.InstanceGroupManagerParamsArgs(resource_manager_tags=identity.tags),
            wait_for_instances=False,
            # A machine that starts finds its way out and its rights there, and they are there until it has ended.
            opts=pulumi.ResourceOptions(
                parent=self, depends_on=[network, identity], ignore_changes=["description", "targetSize"]
            ),
        )
        self.register_outputs({"group": self.group.name})

    def _template(
        self, network: Network, identity: Identity, compact: compute.ResourcePolicy | None
    ) -> compute.InstanceTemplate:
        request = self._request
        machine_type, hung_on = shape(self._machine)
        return compute.InstanceTemplate(
            request.cluster,
            name_prefix=f"gpuctl-{request.cluster}-",
            machine_type=machine_type,
            guest_accelerators=[compute.InstanceTemplateGuestAcceleratorArgs(type=hung_on[0], count=hung_on[1])]
            if hung_on
            else None,
            scheduling=self._scheduling(),
            resource_policies=compact.self_link if compact else None,
            disks=[
                compute.InstanceTemplateDiskArgs(
                    boot=True,
                    auto_delete=True,
                    source_image=request.image or self._image(),
                    disk_type=disk_type(self._machine),
                    disk_size_gb=request.disk_gb,
                    labels=labels(request),
                )
            ],
            network_interfaces=[
                compute.InstanceTemplateNetworkInterfaceArgs(
                    subnetwork=network.subnets[0].id,
                    nic_type="GVNIC" if self._machine.fabric == "gvnic" else None,
                    access_configs=[compute.InstanceTemplateNetworkInterfaceAccessConfigArgs(network_tier="PREMIUM")],
                )
            ],
            tags=[network.tag],
            # The scope is all there is: the account's roles are what limits it.
            service_account=compute.InstanceTemplateServiceAccountArgs(email=identity.email, scopes=["cloud-platform"]),
            metadata=self._metadata(),
            labels=labels(request),
            # Looked up once: else every `up` would make a new template because there is a newer image.
            opts=pulumi.ResourceOptions(parent=self, ignore_changes=[] if request.image else ["disks[0].sourceImage"]),
        )

    def _scheduling(self) -> compute.InstanceTemplateSchedulingArgs:
        """A machine with GPUs cannot be moved while it runs, spot or not."""
        if not self._request.spot:
            return compute.InstanceTemplateSchedulingArgs(
                provisioning_model="STANDARD", automatic_restart=True, on_host_maintenance="TERMINATE"
            )
        return compute.InstanceTemplateSchedulingArgs(
            provisioning_model="SPOT",
            preemptible=True,
            automatic_restart=False,
            on_host_maintenance="TERMINATE",
            instance_termination_action="DELETE",
            preemption_notice_duration=compute.InstanceTemplateSchedulingPreemptionNoticeDurationArgs(seconds=NOTICE_S),
        )

    def _metadata(self) -> dict[str, str]:
        """``user-data`` is cloud-init's own key."""
        told = {
            "user-data": base64.b64encode(compressed(self._request.user_data)).decode(),
            "user-data-encoding": "base64",
            "block-project-ssh-keys": "true",
            "enable-oslogin": "FALSE",
        }
        return told | ({"ssh-keys": f"ubuntu:{self._request.ssh_key}"} if self._request.ssh_key else {})

    def _image(self) -> pulumi.Output[str]:
        found = compute.get_image_output(family=FAMILY, project=_IMAGES, opts=pulumi.InvokeOutputOptions(parent=self))
        return found.self_link

    def _compact(self) -> compute.ResourcePolicy:
        return compute.ResourcePolicy(
            self._request.cluster,
            name=self._request.named(63),
            description=described(self._request, "placement of the"),
            region=self._request.region,
            group_placement_policy=compute.ResourcePolicyGroupPlacementPolicyArgs(collocation="COLLOCATED"),
            opts=self._described_once,
        )

    def _throughput(self) -> compute.ResourcePolicy:
        return compute.ResourcePolicy(
            self._request.cluster,
            name=self._request.named(63),
            description=described(self._request, "placement of the"),
            region=self._request.region,
            workload_policy=compute.ResourcePolicyWorkloadPolicyArgs(type="HIGH_THROUGHPUT"),
            opts=self._described_once,
        )
