"""The machines: a launch template, and an auto scaling group that replaces those which are taken.

Nothing here waits for machines, and nothing fights their number. A new group is empty: ``up`` asks for machines once
all of this exists and what they fetch lies in the bucket, and a node that was idle shrinks the group itself.
"""

from __future__ import annotations

import base64

import pulumi
from pulumi_aws import autoscaling, ec2, ssm

from gpuctl.stacks.catalog.instance_types import MachineType
from gpuctl.stacks.clouds import aws as cloud
from gpuctl.stacks.clouds.aws.resources.identity import Identity
from gpuctl.stacks.clouds.aws.resources.network import Network
from gpuctl.stacks.clouds.user_data import compressed
from gpuctl.stacks.request.stack_request import StackRequest

_IMAGE = "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id"

_ROOT_DEVICE = "/dev/sda1"
"""Of Ubuntu's images. Amazon Linux has /dev/xvda."""
_DEVICE_0_ALONE = ("p5en", "p6-b200")
FAST_DISK_MB_PER_S = 500
"""Of machines that can take it, in place of 125: more than checkpoints' tiers and images need, at half the price of
the most that the volume's 3,000 operations a second allow, which is 750 (Amazon EBS user guide, "General Purpose SSD
volumes"; EC2 user guide, "EBS-optimized instance types")."""


class Group(pulumi.ComponentResource):
    """The machines of a cluster. ``group``: the auto scaling group.

    Args:
        request: the whole cluster; ``nodes_max`` limits the group, which is made empty.
        machine: the catalog's entry for the request's type.
        network: holds the subnets, one for each zone, and the security group of the machines.
        identity: holds the instance profile by which the machines have their rights.
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
        super().__init__("gpuctl:aws:Group", request.cluster, opts=opts)
        self._request = request
        self._machine = machine
        self._network = network
        self._inside = pulumi.ResourceOptions(parent=self)
        template = self._template(identity)
        side_by_side = self._side_by_side()
        self.group = autoscaling.Group(
            request.cluster,
            name_prefix=f"gpuctl-{request.cluster}-",
            min_size=0,
            max_size=request.nodes_max,
            desired_capacity=0,
            vpc_zone_identifiers=[subnet.id for subnet in network.subnets],
            placement_group=side_by_side.name if side_by_side else None,
            mixed_instances_policy=autoscaling.GroupMixedInstancesPolicyArgs(
                instances_distribution=autoscaling.GroupMixedInstancesPolicyInstancesDistributionArgs(
                    on_demand_base_capacity=0,
                    on_demand_percentage_above_base_capacity=0 if request.spot else 100,
                    # Never lowest-price: the cheapest pool is the one that is taken next.
                    spot_allocation_strategy="price-capacity-optimized" if request.spot else None,
                ),
                launch_template=autoscaling.GroupMixedInstancesPolicyLaunchTemplateArgs(
                    launch_template_specification=autoscaling.GroupMixedInstancesPolicyLaunchTemplateLaunchTemplateSpecificationArgs(
                        launch_template_id=template.id, version=template.latest_version.apply(str)
                    )
                ),
            ),
            capacity_rebalance=False,  # it launches first, and so goes beyond the maximum
            suspended_processes=["AZRebalance"],  # it ends machines that work, for the zones' balance
            health_check_type="EC2",
            health_check_grace_period=600,
            default_cooldown=0,
            wait_for_capacity_timeout="0",
            force_delete=True,
            tags=[
                autoscaling.GroupTagArgs(key=key, value=value, propagate_at_launch=True)
                for key, value in {**request.tags(), "Name": request.cluster}.items()
            ],
            # A machine that starts finds its way out and its rights there, and they are there until it has ended.
            opts=pulumi.ResourceOptions(
                parent=self, depends_on=[network, identity], ignore_changes=["desiredCapacity"]
            ),
        )
        self.register_outputs({"group": self.group.name})

    def _template(self, identity: Identity) -> ec2.LaunchTemplate:
        request = self._request
        tags = {**request.tags(), "Name": request.cluster}
        return ec2.LaunchTemplate(
            request.cluster,
            name_prefix=f"gpuctl-{request.cluster}-",
            image_id=request.image or self._image(),
            instance_type=self._machine.name,
            key_name=self._key(),
            update_default_version=True,
            iam_instance_profile=ec2.LaunchTemplateIamInstanceProfileArgs(arn=identity.profile.arn),
            network_interfaces=self._cards(),
            block_device_mappings=[
                ec2.LaunchTemplateBlockDeviceMappingArgs(
                    device_name=self._root_device(),
                    ebs=ec2.LaunchTemplateBlockDeviceMappingEbsArgs(
                        volume_size=request.disk_gb,
                        volume_type="gp3",
                        throughput=FAST_DISK_MB_PER_S if self._machine.takes_fast_disk else None,
                        encrypted="true",
                        delete_on_termination="true",
                    ),
                )
            ],
            metadata_options=ec2.LaunchTemplateMetadataOptionsArgs(
                http_endpoint="enabled",
                http_tokens="required",
                http_put_response_hop_limit=2,  # from inside of a container too
                instance_metadata_tags="enabled",
            ),
            user_data=base64.b64encode(compressed(request.user_data)).decode(),
            tag_specifications=[
                ec2.LaunchTemplateTagSpecificationArgs(resource_type=kind, tags=tags)
                for kind in ("instance", "volume", "network-interface")
            ],
            tags=tags,
            # Looked up once: else every `up` would replace machines because there is a newer image.
            opts=pulumi.ResourceOptions(parent=self, ignore_changes=[] if request.image else ["imageId"]),
        )

    def _root_device(self) -> str | pulumi.Output[str]:
        """The root device's name. Under another name the image's own disk would stay as small as it is, and this one
        come besides."""
        if not self._request.image:
            return _ROOT_DEVICE
        image = ec2.get_ami_output(
            filters=[ec2.GetAmiFilterArgs(name="image-id", values=[self._request.image])],
            include_deprecated=True,
            opts=pulumi.InvokeOutputOptions(parent=self),
        )
        return image.root_device_name.apply(lambda name: name or _ROOT_DEVICE)  # a plan is made offline

    def _image(self) -> pulumi.Output[str]:
        return ssm.get_parameter_output(name=_IMAGE, opts=pulumi.InvokeOutputOptions(parent=self)).value

    def _key(self) -> pulumi.Output[str] | None:
        if not self._request.ssh_key:
            return None
        return ec2.KeyPair(
            self._request.cluster,
            key_name_prefix=f"gpuctl-{self._request.cluster}-",
            public_key=self._request.ssh_key,
            tags=self._request.tags(),
            opts=self._inside,
        ).key_name

    def _cards(self) -> list[ec2.LaunchTemplateNetworkInterfaceArgs]:
        """One interface for each card with EFA; all but the first have no address: they carry EFA only. Security groups
        belong here once there is such a list."""
        efa = self._machine.fabric == "efa"
        public = "true" if cloud.has_public_address(self._machine) else None
        return [
            ec2.LaunchTemplateNetworkInterfaceArgs(
                network_card_index=card,
                device_index=0 if card == 0 else self._further_device(),
                interface_type=("efa" if card == 0 else "efa-only") if efa else None,
                associate_public_ip_address=public,
                delete_on_termination="true",
                security_groups=[self._network.security_group.id],
            )
            for card in range(max(1, self._machine.fabric_cards))
        ]

    def _further_device(self) -> int:
        """The device index of all network cards but the first: 1, as the user guide has it ("Maximize network bandwidth
        on Amazon EC2 instances with multiple network cards"), and 0 on newer types, whose cards have no other
        (aws-parallelcluster #6930)."""
        return 0 if self._machine.family in _DEVICE_0_ALONE else 1

    def _side_by_side(self) -> ec2.PlacementGroup | None:
        if self._machine.fabric != "efa" or not self._request.placement:
            return None
        return ec2.PlacementGroup(
            self._request.cluster, strategy="cluster", tags=self._request.tags(), opts=self._inside
        )
