"""The deletion of each kind of thing on AWS, and its order: see ``removal``, which has the patience.

Each takes a client of boto3 and the id that ``leaks`` has given, and raises what botocore raises.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gpuctl.cluster.errors import GpuctlError
from gpuctl.stacks.clouds.answers import Leftover


class InUse(GpuctlError):
    """A resource is still in use. Raised before AWS is asked, where its own words would mislead."""


@dataclass(frozen=True, slots=True)
class DeletionRule:
    """The calls that delete resources of one kind."""

    kind: str
    """As ``leaks`` has it."""
    delete: Callable[[Any, str], object]
    is_there: Callable[[Any, str], object] = lambda _client, _id: False
    """Whether it is still there once AWS has agreed to delete it."""
    service: str = "ec2"

    def is_for(self, one: Leftover) -> bool:
        return one.kind == self.kind


# -- machines ---------------------------------------------------------------------------------------------------------


def _delete_group(client: Any, name: str) -> None:
    """Ends its machines too, those that no scan has seen among them: the group goes after the last one."""
    client.delete_auto_scaling_group(AutoScalingGroupName=name, ForceDelete=True)


def _group_is_there(client: Any, name: str) -> bool:
    return bool(client.describe_auto_scaling_groups(AutoScalingGroupNames=[name])["AutoScalingGroups"])


def _instance_runs(client: Any, name: str) -> bool:
    found = client.describe_instances(InstanceIds=[name])["Reservations"]
    return any(one["State"]["Name"] != "terminated" for reservation in found for one in reservation["Instances"])


def _volume_is_there(client: Any, name: str) -> bool:
    found = client.describe_volumes(VolumeIds=[name])["Volumes"]
    return any(one["State"] != "deleted" for one in found)


def _placement_is_there(client: Any, name: str) -> bool:
    found = client.describe_placement_groups(GroupNames=[name])["PlacementGroups"]
    return any(one.get("State") != "deleted" for one in found)


# -- networks ---------------------------------------------------------------------------------------------------------


def _connect_endpoint_is_there(client: Any, name: str) -> bool:
    found = client.describe_instance_connect_endpoints(InstanceConnectEndpointIds=[name])["InstanceConnectEndpoints"]
    return any(one.get("State") != "delete-complete" for one in found)


def _delete_vpc_endpoint(client: Any, name: str) -> None:
    for refused in client.delete_vpc_endpoints(VpcEndpointIds=[name]).get("Unsuccessful", ()):
        told = refused.get("Error", {})
        if not told.get("Code", "").endswith("NotFound"):
            raise GpuctlError(f"AWS refused DeleteVpcEndpoints: {told.get('Code')}: {told.get('Message')}")


def _vpc_endpoint_is_there(client: Any, name: str) -> bool:
    found = client.describe_vpc_endpoints(VpcEndpointIds=[name])["VpcEndpoints"]
    return any(one.get("State", "").lower() != "deleted" for one in found)


def _nat_is_there(client: Any, name: str) -> bool:
    found = client.describe_nat_gateways(NatGatewayIds=[name])["NatGateways"]
    return any(one.get("State") != "deleted" for one in found)


def _release(client: Any, name: str) -> None:
    """AWS calls it a failure of authentication to release the address of a NAT gateway that has not quite gone."""
    for address in client.describe_addresses(AllocationIds=[name])["Addresses"]:
        if address.get("AssociationId"):
            raise InUse(f"{address.get('PublicIp')} is in use by {address.get('NetworkInterfaceId', 'something')}")
    client.release_address(AllocationId=name)


def _delete_security_group(client: Any, name: str) -> None:
    """Delete a security group after its rules for other groups: none goes while a rule names it."""
    pages = client.get_paginator("describe_security_group_rules").paginate(
        Filters=[{"Name": "group-id", "Values": [name]}]
    )
    for rule in [rule for page in pages for rule in page["SecurityGroupRules"] if rule.get("ReferencedGroupInfo")]:
        _revoke(client, rule)
    client.delete_security_group(GroupId=name)


def _delete_rule(client: Any, name: str) -> None:
    for rule in client.describe_security_group_rules(SecurityGroupRuleIds=[name])["SecurityGroupRules"]:
        _revoke(client, rule)


def _revoke(client: Any, rule: dict[str, Any]) -> None:
    revoke = client.revoke_security_group_egress if rule["IsEgress"] else client.revoke_security_group_ingress
    revoke(GroupId=rule["GroupId"], SecurityGroupRuleIds=[rule["SecurityGroupRuleId"]])


def _delete_route_table(client: Any, name: str) -> None:
    (table,) = client.describe_route_tables(RouteTableIds=[name])["RouteTables"]
    for association in table.get("Associations", ()):
        if association.get("Main"):  # goes with its VPC
            return
        client.disassociate_route_table(AssociationId=association["RouteTableAssociationId"])
    client.delete_route_table(RouteTableId=name)


def _delete_internet_gateway(client: Any, name: str) -> None:
    (gateway,) = client.describe_internet_gateways(InternetGatewayIds=[name])["InternetGateways"]
    for attachment in gateway.get("Attachments", ()):
        client.detach_internet_gateway(InternetGatewayId=name, VpcId=attachment["VpcId"])
    client.delete_internet_gateway(InternetGatewayId=name)


# -- rights -----------------------------------------------------------------------------------------------------------


def _delete_role(client: Any, name: str) -> None:
    for page in client.get_paginator("list_role_policies").paginate(RoleName=name):
        for policy in page["PolicyNames"]:
            client.delete_role_policy(RoleName=name, PolicyName=policy)
    for page in client.get_paginator("list_attached_role_policies").paginate(RoleName=name):
        for policy in page["AttachedPolicies"]:
            client.detach_role_policy(RoleName=name, PolicyArn=policy["PolicyArn"])
    for page in client.get_paginator("list_instance_profiles_for_role").paginate(RoleName=name):
        for profile in page["InstanceProfiles"]:
            client.remove_role_from_instance_profile(InstanceProfileName=profile["InstanceProfileName"], RoleName=name)
    client.delete_role(RoleName=name)


def _delete_profile(client: Any, name: str) -> None:
    for role in client.get_instance_profile(InstanceProfileName=name)["InstanceProfile"]["Roles"]:
        client.remove_role_from_instance_profile(InstanceProfileName=name, RoleName=role["RoleName"])
    client.delete_instance_profile(InstanceProfileName=name)


STAGES: tuple[tuple[DeletionRule, ...], ...] = (
    (
        DeletionRule("auto scaling group", _delete_group, _group_is_there, "autoscaling"),
        DeletionRule("instance", lambda ec2, name: ec2.terminate_instances(InstanceIds=[name]), _instance_runs),
        DeletionRule(
            "instance connect endpoint",
            lambda ec2, name: ec2.delete_instance_connect_endpoint(InstanceConnectEndpointId=name),
            _connect_endpoint_is_there,
        ),
        DeletionRule("VPC endpoint", _delete_vpc_endpoint, _vpc_endpoint_is_there),
        DeletionRule("NAT gateway", lambda ec2, name: ec2.delete_nat_gateway(NatGatewayId=name), _nat_is_there),
    ),
    (
        DeletionRule("elastic IP", _release),
        DeletionRule("volume", lambda ec2, name: ec2.delete_volume(VolumeId=name), _volume_is_there),
        DeletionRule("network interface", lambda ec2, name: ec2.delete_network_interface(NetworkInterfaceId=name)),
        DeletionRule("launch template", lambda ec2, name: ec2.delete_launch_template(LaunchTemplateId=name)),
        DeletionRule(
            "placement group", lambda ec2, name: ec2.delete_placement_group(GroupName=name), _placement_is_there
        ),
        DeletionRule("key pair", lambda ec2, name: ec2.delete_key_pair(KeyPairId=name)),
    ),
    (
        DeletionRule("security group rule", _delete_rule),
        DeletionRule("security group", _delete_security_group),
        DeletionRule("route table", _delete_route_table),
    ),
    (
        DeletionRule("subnet", lambda ec2, name: ec2.delete_subnet(SubnetId=name)),
        DeletionRule("internet gateway", _delete_internet_gateway),
    ),
    (DeletionRule("VPC", lambda ec2, name: ec2.delete_vpc(VpcId=name)),),
    (
        DeletionRule("role", _delete_role, service="iam"),
        DeletionRule("instance profile", _delete_profile, service="iam"),
    ),
)
"""What is in one goes at once, the first first. All that costs money is in the first two."""
