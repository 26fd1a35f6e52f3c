"""A network of the cluster's own, with one subnet: all traffic passes between its nodes, SSH from the user's network
only, and nothing else comes in.

Nodes have public addresses, which is how they reach the Internet and are reached. The block keeps clear of
172.16.0.0/16, which machines with InfiniBand use within.
"""

from __future__ import annotations

import pulumi
from pulumi_azure_native import network as azure_network

from gpuctl.stacks.catalog.instance_types import MachineType
from gpuctl.stacks.clouds.azure import resource_group
from gpuctl.stacks.request.stack_request import StackRequest

_BLOCK = "10.77.0.0/16"


class Network(pulumi.ComponentResource):
    """``subnets``, of which there is one."""

    def __init__(self, request: StackRequest, machine: MachineType, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("gpuctl:azure:Network", request.cluster, opts=opts)
        del machine  # InfiniBand is not among a machine's network cards
        self._request = request
        self._inside = pulumi.ResourceOptions(parent=self, depends_on=opts.depends_on if opts else None)
        network = azure_network.VirtualNetwork(
            request.cluster,
            virtual_network_name=request.named(64),
            resource_group_name=resource_group(request),
            location=request.region,
            address_space=azure_network.AddressSpaceArgs(address_prefixes=[_BLOCK]),
            tags=request.tags(),
            opts=self._inside,
        )
        self.subnets = [
            azure_network.Subnet(
                request.cluster,
                subnet_name="nodes",
                resource_group_name=resource_group(request),
                virtual_network_name=network.name,
                address_prefix=_BLOCK,
                default_outbound_access=False,
                network_security_group=azure_network.NetworkSecurityGroupArgs(id=self._security_group().id),
                opts=self._inside,
            )
        ]
        self.register_outputs({"network": network.id})

    def _security_group(self) -> azure_network.NetworkSecurityGroup:
        """The rules on what may come in: what none of them names is refused by a rule that Azure adds."""
        rules = [_comes_in("between-the-nodes", 100, _BLOCK, azure_network.SecurityRuleProtocol.ASTERISK, "*")]
        if self._request.ssh_from:
            rules.append(_comes_in("ssh", 110, self._request.ssh_from, azure_network.SecurityRuleProtocol.TCP, "22"))
        return azure_network.NetworkSecurityGroup(
            self._request.cluster,
            network_security_group_name=self._request.named(64),
            resource_group_name=resource_group(self._request),
            location=self._request.region,
            security_rules=rules,
            tags=self._request.tags(),
            opts=self._inside,
        )


def _comes_in(
    name: str, priority: int, source: str, protocol: azure_network.SecurityRuleProtocol, port: str
) -> azure_network.SecurityRuleArgs:
    return azure_network.SecurityRuleArgs(
        name=name,
        priority=priority,
        direction=azure_network.SecurityRuleDirection.INBOUND,
        access=azure_network.SecurityRuleAccess.ALLOW,
        protocol=protocol,
        source_address_prefix=source,
        source_port_range="*",
        destination_address_prefix="*",
        destination_port_range=port,
    )
