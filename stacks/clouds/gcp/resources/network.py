"""A network of the cluster's own, with one subnet: all traffic passes between its nodes, SSH from the user's network
only, and nothing else comes in.

Nodes have public addresses, which is how they reach the Internet and are reached; their way to the bucket stays within
Google's network.
"""

from __future__ import annotations

import pulumi
from pulumi_gcp import compute

from gpuctl.stacks.catalog.instance_types import MachineType
from gpuctl.stacks.clouds.gcp.ownership import described
from gpuctl.stacks.request.stack_request import StackRequest

_BLOCK = "10.77.0.0/16"
_MTU = 8896
"""The largest there is: NCCL over TCP gains by it."""


class Network(pulumi.ComponentResource):
    """``subnets``, of which there is one, and ``tag``, which says of a machine that it is a node."""

    def __init__(self, request: StackRequest, machine: MachineType, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("gpuctl:gcp:Network", request.cluster, opts=opts)
        del machine  # one network card each, whatever the type
        inside = pulumi.ResourceOptions(parent=self)
        # It tells whose it is, and to change it would be to make the thing again.
        described_once = pulumi.ResourceOptions(parent=self, ignore_changes=["description"])
        self.tag = request.named(63)
        network = compute.Network(
            request.cluster,
            name=request.named(63),
            description=described(request, "network of the"),
            auto_create_subnetworks=False,
            mtu=_MTU,
            opts=described_once,
        )
        self.subnets = [
            compute.Subnetwork(
                request.cluster,
                name=request.named(63),
                description=described(request, "subnet of the"),
                network=network.id,
                region=request.region,
                ip_cidr_range=_BLOCK,
                private_ip_google_access=True,
                opts=described_once,
            )
        ]
        compute.Firewall(
            f"{request.cluster}-nodes",
            name=f"{request.named(57)}-nodes",
            network=network.id,
            description=described(request, "traffic between the nodes of the"),
            direction="INGRESS",
            allows=[compute.FirewallAllowArgs(protocol="all")],
            source_tags=[self.tag],
            target_tags=[self.tag],
            opts=inside,
        )
        if request.ssh_from:
            compute.Firewall(
                f"{request.cluster}-ssh",
                name=f"{request.named(57)}-ssh",
                network=network.id,
                description=described(request, "SSH to the nodes of the"),
                direction="INGRESS",
                allows=[compute.FirewallAllowArgs(protocol="tcp", ports=["22"])],
                source_ranges=[request.ssh_from],
                target_tags=[self.tag],
                opts=inside,
            )
        self.register_outputs({"network": network.id})
