"""A network of the cluster's own: one subnet for each zone, and a security group within which all traffic passes.

Types with one network card get public addresses. Those with several cannot, so they live in private subnets: they reach
the Internet through a NAT gateway, S3 through a gateway endpoint that costs nothing, and are reached by SSH through an
EC2 Instance Connect endpoint, which costs nothing either. Who may use the endpoint is decided by IAM; it hands the
user's address on, so that the rule for SSH is the same either way.
"""

from __future__ import annotations

import pulumi
from pulumi_aws import ec2, ec2transitgateway, vpc

from gpuctl.stacks.catalog.instance_types import MachineType
from gpuctl.stacks.clouds import aws as cloud
from gpuctl.stacks.request.stack_request import StackRequest

_VPC = "10.77.0.0/16"
_PUBLIC = "10.77.250.0/24"
"""For the NAT gateway."""


class Network(pulumi.ComponentResource):
    """``subnets``, in the order of the request's zones, and ``security_group``."""

    def __init__(self, request: StackRequest, machine: MachineType, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("gpuctl:aws:Network", request.cluster, opts=opts)
        self._request = request
        self._inside = pulumi.ResourceOptions(parent=self)
        self._tags = {**request.tags(), "Name": request.cluster}
        public = cloud.has_public_address(machine)
        self.vpc = ec2.Vpc(
            request.cluster,
            cidr_block=_VPC,
            enable_dns_hostnames=True,
            enable_dns_support=True,
            tags=self._tags,
            opts=self._inside,
        )
        self._gateway = ec2.InternetGateway(request.cluster, vpc_id=self.vpc.id, tags=self._tags, opts=self._inside)
        self._open = self._routes(
            "public", ec2.RouteTableRouteArgs(cidr_block="0.0.0.0/0", gateway_id=self._gateway.id)
        )
        routes = self._open if public else self._behind_nat()
        self.subnets = [
            self._subnet(zone, f"10.77.{16 * number}.0/20", zone, routes, public=public)
            for number, zone in enumerate(request.zones)
        ]
        ec2.VpcEndpoint(
            f"{request.cluster}-s3",
            vpc_id=self.vpc.id,
            service_name=f"com.amazonaws.{request.region}.s3",
            vpc_endpoint_type="Gateway",
            route_table_ids=[routes.id],
            tags=self._tags,
            opts=self._inside,
        )
        self.security_group = self._security_group(public=public)
        self.register_outputs({"vpc": self.vpc.id})

    def _subnet(self, name: str, block: str, zone: str, routes: ec2.RouteTable, *, public: bool) -> ec2.Subnet:
        subnet = ec2.Subnet(
            f"{self._request.cluster}-{name}",
            vpc_id=self.vpc.id,
            availability_zone=zone,
            cidr_block=block,
            map_public_ip_on_launch=public,
            tags=self._tags,
            opts=self._inside,
        )
        ec2.RouteTableAssociation(
            f"{self._request.cluster}-{name}", subnet_id=subnet.id, route_table_id=routes.id, opts=self._inside
        )
        return subnet

    def _routes(self, name: str, route: ec2.RouteTableRouteArgs) -> ec2.RouteTable:
        return ec2.RouteTable(
            f"{self._request.cluster}-{name}", vpc_id=self.vpc.id, routes=[route], tags=self._tags, opts=self._inside
        )

    def _behind_nat(self) -> ec2.RouteTable:
        name = f"{self._request.cluster}-nat"
        # Neither works, nor can the gateway be taken away, but while it is attached to the network.
        outside = pulumi.ResourceOptions.merge(self._inside, pulumi.ResourceOptions(depends_on=[self._gateway]))
        address = ec2.Eip(name, domain="vpc", tags=self._tags, opts=outside)
        subnet = self._subnet("nat", _PUBLIC, self._request.zones[0], self._open, public=False)
        nat = ec2.NatGateway(name, allocation_id=address.id, subnet_id=subnet.id, tags=self._tags, opts=outside)
        return self._routes("private", ec2.RouteTableRouteArgs(cidr_block="0.0.0.0/0", nat_gateway_id=nat.id))

    def _security_group(self, *, public: bool) -> ec2.SecurityGroup:
        """EFA wants a rule for all traffic to the group itself in *and* out, besides the one for the Internet."""
        group = ec2.SecurityGroup(
            f"{self._request.cluster}-nodes",
            vpc_id=self.vpc.id,
            description=f"nodes of the gpuctl cluster {self._request.cluster}",
            tags=self._tags,
            opts=self._inside,
        )
        name = self._request.cluster
        vpc.SecurityGroupIngressRule(
            f"{name}-self-in",
            security_group_id=group.id,
            ip_protocol="-1",
            referenced_security_group_id=group.id,
            description="between the nodes",
            tags=self._tags,
            opts=self._inside,
        )
        vpc.SecurityGroupEgressRule(
            f"{name}-self-out",
            security_group_id=group.id,
            ip_protocol="-1",
            referenced_security_group_id=group.id,
            description="between the nodes: EFA asks for it",
            tags=self._tags,
            opts=self._inside,
        )
        vpc.SecurityGroupEgressRule(
            f"{name}-out",
            security_group_id=group.id,
            ip_protocol="-1",
            cidr_ipv4="0.0.0.0/0",
            description="packages, images, the bucket",
            tags=self._tags,
            opts=self._inside,
        )
        if self._request.ssh_from:
            vpc.SecurityGroupIngressRule(
                f"{name}-ssh",
                security_group_id=group.id,
                ip_protocol="tcp",
                from_port=22,
                to_port=22,
                cidr_ipv4=self._request.ssh_from,
                description="SSH from the user's network",
                tags=self._tags,
                opts=self._inside,
            )
            if not public:
                self._endpoint(group)
        return group

    def _endpoint(self, nodes: ec2.SecurityGroup) -> None:
        """SSH without a public address."""
        name = f"{self._request.cluster}-ssh"
        group = ec2.SecurityGroup(
            name,
            vpc_id=self.vpc.id,
            description=f"SSH endpoint of the gpuctl cluster {self._request.cluster}",
            tags=self._tags,
            opts=self._inside,
        )
        vpc.SecurityGroupEgressRule(
            name,
            security_group_id=group.id,
            ip_protocol="tcp",
            from_port=22,
            to_port=22,
            referenced_security_group_id=nodes.id,
            description="SSH to the nodes",
            tags=self._tags,
            opts=self._inside,
        )
        ec2transitgateway.InstanceConnectEndpoint(
            name,
            subnet_id=self.subnets[0].id,
            security_group_ids=[group.id],
            preserve_client_ip=True,
            tags=self._tags,
            opts=self._inside,
        )
