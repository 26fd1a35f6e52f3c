"""Networks that ``resource_plugin`` makes on AWS."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from tests.fakes.aws.calls import Record, client, gone_or, only, retagged, seen, tagged


def _vpc(inputs: Record) -> Record:
    ec2 = client("ec2")
    made = ec2.create_vpc(CidrBlock=inputs["cidrBlock"], TagSpecifications=tagged(inputs, "vpc"))["Vpc"]
    for key, name in (("enableDnsHostnames", "EnableDnsHostnames"), ("enableDnsSupport", "EnableDnsSupport")):
        if key in inputs:
            ec2.modify_vpc_attribute(VpcId=made["VpcId"], **{name: {"Value": inputs[key]}})
    return {"id": made["VpcId"]}


def _internet_gateway(inputs: Record) -> Record:
    made = client("ec2").create_internet_gateway(TagSpecifications=tagged(inputs, "internet-gateway"))
    id_ = made["InternetGateway"]["InternetGatewayId"]
    client("ec2").attach_internet_gateway(InternetGatewayId=id_, VpcId=inputs["vpcId"])
    return {"id": id_}


def _no_route_table(id_: str) -> None:
    """As Terraform's provider does: with all its associations, those that no state knows too."""
    (table,) = client("ec2").describe_route_tables(RouteTableIds=[id_])["RouteTables"]
    for association in table["Associations"]:
        client("ec2").disassociate_route_table(AssociationId=association["RouteTableAssociationId"])
    client("ec2").delete_route_table(RouteTableId=id_)


def _no_internet_gateway(id_: str) -> None:
    (found,) = client("ec2").describe_internet_gateways(InternetGatewayIds=[id_])["InternetGateways"]
    for attached in found["Attachments"]:
        client("ec2").detach_internet_gateway(InternetGatewayId=id_, VpcId=attached["VpcId"])
    client("ec2").delete_internet_gateway(InternetGatewayId=id_)


def _route_table(inputs: Record) -> Record:
    made = client("ec2").create_route_table(VpcId=inputs["vpcId"], TagSpecifications=tagged(inputs, "route-table"))
    id_ = made["RouteTable"]["RouteTableId"]
    for route in inputs["routes"]:
        keys = (("gatewayId", "GatewayId"), ("natGatewayId", "NatGatewayId"))
        via = {name: route[key] for key, name in keys if route.get(key)}
        client("ec2").create_route(RouteTableId=id_, DestinationCidrBlock=route["cidrBlock"], **via)
    return {"id": id_}


def _association(inputs: Record) -> Record:
    made = client("ec2").associate_route_table(SubnetId=inputs["subnetId"], RouteTableId=inputs["routeTableId"])
    return {"id": made["AssociationId"]}


def _subnet(inputs: Record) -> Record:
    made = client("ec2").create_subnet(
        VpcId=inputs["vpcId"],
        CidrBlock=inputs["cidrBlock"],
        AvailabilityZone=inputs["availabilityZone"],
        TagSpecifications=tagged(inputs, "subnet"),
    )
    return {"id": made["Subnet"]["SubnetId"]}


def _endpoint(inputs: Record) -> Record:
    made = client("ec2").create_vpc_endpoint(
        VpcId=inputs["vpcId"],
        ServiceName=inputs["serviceName"],
        VpcEndpointType=inputs["vpcEndpointType"],
        RouteTableIds=inputs["routeTableIds"],
        TagSpecifications=tagged(inputs, "vpc-endpoint"),
    )
    return {"id": made["VpcEndpoint"]["VpcEndpointId"]}


def _no_endpoint(id_: str) -> None:
    client("ec2").delete_vpc_endpoints(VpcEndpointIds=[id_])


def _address(inputs: Record) -> Record:
    made = client("ec2").allocate_address(Domain=inputs["domain"], TagSpecifications=tagged(inputs, "elastic-ip"))
    return {"id": made["AllocationId"], "allocationId": made["AllocationId"], "publicIp": made["PublicIp"]}


def _nat(inputs: Record) -> Record:
    made = client("ec2").create_nat_gateway(
        AllocationId=inputs["allocationId"],
        SubnetId=inputs["subnetId"],
        TagSpecifications=tagged(inputs, "natgateway"),
    )
    return {"id": made["NatGateway"]["NatGatewayId"]}


def _security_group(inputs: Record) -> Record:
    ec2 = client("ec2")
    id_ = ec2.create_security_group(
        GroupName=inputs["name"],
        Description=inputs["description"],
        VpcId=inputs["vpcId"],
        TagSpecifications=tagged(inputs, "security-group"),
    )["GroupId"]
    (group,) = ec2.describe_security_groups(GroupIds=[id_])["SecurityGroups"]
    ec2.revoke_security_group_egress(GroupId=id_, IpPermissions=group["IpPermissionsEgress"])  # as Terraform's provider
    return {"id": id_}


def _rule(direction: str, inputs: Record) -> Record:
    made = getattr(client("ec2"), f"authorize_security_group_{direction}")(
        GroupId=inputs["securityGroupId"], IpPermissions=[_permission(inputs)]
    )
    return {"id": made["SecurityGroupRules"][0]["SecurityGroupRuleId"]}


def _permission(inputs: Record) -> Record:
    about = {"Description": inputs["description"]}
    found: Record = {"IpProtocol": inputs["ipProtocol"]}
    if "fromPort" in inputs:
        found |= {"FromPort": int(inputs["fromPort"]), "ToPort": int(inputs["toPort"])}
    if "cidrIpv4" in inputs:
        return {**found, "IpRanges": [{"CidrIp": inputs["cidrIpv4"], **about}]}
    return {**found, "UserIdGroupPairs": [{"GroupId": inputs["referencedSecurityGroupId"], **about}]}


def _no_rule(direction: str, id_: str) -> None:
    (rule,) = client("ec2").describe_security_group_rules(SecurityGroupRuleIds=[id_])["SecurityGroupRules"]
    revoke = getattr(client("ec2"), f"revoke_security_group_{direction}")
    revoke(GroupId=rule["GroupId"], SecurityGroupRuleIds=[id_])


def _change_rule(id_: str, before: Record, inputs: Record) -> Record:
    only({"cidrIpv4"}, before, inputs)
    wanted = {
        "IpProtocol": inputs["ipProtocol"],
        "FromPort": int(inputs["fromPort"]),
        "ToPort": int(inputs["toPort"]),
        "CidrIpv4": inputs["cidrIpv4"],
    }
    client("ec2").modify_security_group_rules(
        GroupId=inputs["securityGroupId"],
        SecurityGroupRules=[{"SecurityGroupRuleId": id_, "SecurityGroupRule": wanted}],
    )
    return {}


def _connect_endpoint(inputs: Record) -> Record:
    made = client("ec2").create_instance_connect_endpoint(
        SubnetId=inputs["subnetId"],
        SecurityGroupIds=inputs["securityGroupIds"],
        PreserveClientIp=inputs["preserveClientIp"],
        TagSpecifications=tagged(inputs, "instance-connect-endpoint"),
    )
    return {"id": made["InstanceConnectEndpoint"]["InstanceConnectEndpointId"]}


def _is_associated(id_: str) -> bool:
    of_it = [{"Name": "association.route-table-association-id", "Values": [id_]}]
    return bool(client("ec2").describe_route_tables(Filters=of_it)["RouteTables"])


def _translates(id_: str) -> bool:
    """One that is deleted is listed for an hour."""
    found = client("ec2").describe_nat_gateways(NatGatewayIds=[id_])["NatGateways"]
    return any(one["State"] != "deleted" for one in found)


def _ec2(call: str, key: str) -> Callable[[str], Any]:
    return lambda id_: getattr(client("ec2"), call)(**{key: id_})


_INGRESS = "aws:vpc/securityGroupIngressRule:SecurityGroupIngressRule"
_EGRESS = "aws:vpc/securityGroupEgressRule:SecurityGroupEgressRule"
_CONNECT = "aws:ec2transitgateway/instanceConnectEndpoint:InstanceConnectEndpoint"

MAKERS: dict[str, Callable[[Record], Record]] = {
    "aws:ec2/vpc:Vpc": _vpc,
    "aws:ec2/internetGateway:InternetGateway": _internet_gateway,
    "aws:ec2/routeTable:RouteTable": _route_table,
    "aws:ec2/routeTableAssociation:RouteTableAssociation": _association,
    "aws:ec2/subnet:Subnet": _subnet,
    "aws:ec2/vpcEndpoint:VpcEndpoint": _endpoint,
    "aws:ec2/eip:Eip": _address,
    "aws:ec2/natGateway:NatGateway": _nat,
    "aws:ec2/securityGroup:SecurityGroup": _security_group,
    _INGRESS: partial(_rule, "ingress"),
    _EGRESS: partial(_rule, "egress"),
    _CONNECT: _connect_endpoint,
}
UPDATERS: dict[str, Callable[[str, Record, Record], Record]] = {
    **{kind: retagged for kind in MAKERS if kind.startswith("aws:ec2/") and "Association" not in kind},
    _INGRESS: _change_rule,
}
_UNMAKE: dict[str, Callable[[str], object]] = {
    "aws:ec2/vpc:Vpc": _ec2("delete_vpc", "VpcId"),
    "aws:ec2/internetGateway:InternetGateway": _no_internet_gateway,
    "aws:ec2/routeTable:RouteTable": _no_route_table,
    "aws:ec2/routeTableAssociation:RouteTableAssociation": _ec2("disassociate_route_table", "AssociationId"),
    "aws:ec2/subnet:Subnet": _ec2("delete_subnet", "SubnetId"),
    "aws:ec2/vpcEndpoint:VpcEndpoint": _no_endpoint,
    "aws:ec2/eip:Eip": _ec2("release_address", "AllocationId"),
    "aws:ec2/natGateway:NatGateway": _ec2("delete_nat_gateway", "NatGatewayId"),
    "aws:ec2/securityGroup:SecurityGroup": _ec2("delete_security_group", "GroupId"),
    _INGRESS: partial(_no_rule, "ingress"),
    _EGRESS: partial(_no_rule, "egress"),
    _CONNECT: _ec2("delete_instance_connect_endpoint", "InstanceConnectEndpointId"),
}
UNMAKERS: dict[str, Callable[[str, Record], object]] = {kind: gone_or(unmake) for kind, unmake in _UNMAKE.items()}
SEEN: dict[str, Callable[[str], bool]] = {
    "aws:ec2/vpc:Vpc": seen("ec2", "describe_vpcs", "VpcIds", "Vpcs"),
    "aws:ec2/internetGateway:InternetGateway": seen(
        "ec2", "describe_internet_gateways", "InternetGatewayIds", "InternetGateways"
    ),
    "aws:ec2/routeTable:RouteTable": seen("ec2", "describe_route_tables", "RouteTableIds", "RouteTables"),
    "aws:ec2/subnet:Subnet": seen("ec2", "describe_subnets", "SubnetIds", "Subnets"),
    "aws:ec2/routeTableAssociation:RouteTableAssociation": _is_associated,
    "aws:ec2/vpcEndpoint:VpcEndpoint": seen("ec2", "describe_vpc_endpoints", "VpcEndpointIds", "VpcEndpoints"),
    "aws:ec2/eip:Eip": seen("ec2", "describe_addresses", "AllocationIds", "Addresses"),
    "aws:ec2/natGateway:NatGateway": _translates,
    "aws:ec2/securityGroup:SecurityGroup": seen("ec2", "describe_security_groups", "GroupIds", "SecurityGroups"),
    **{
        kind: seen("ec2", "describe_security_group_rules", "SecurityGroupRuleIds", "SecurityGroupRules")
        for kind in (_INGRESS, _EGRESS)
    },
    _CONNECT: seen(
        "ec2",
        "describe_instance_connect_endpoints",
        "InstanceConnectEndpointIds",
        "InstanceConnectEndpoints",
    ),
}
