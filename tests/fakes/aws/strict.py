"""Moto, as strict and as slow as AWS where something is deleted.

Moto 5.2 lets most things go while others stand in them, and ends machines and gateways at once. Here the refusals of
AWS come first, with its codes, and time passes only when somebody pauses. Placement groups and instance connect
endpoints, which moto does not know, are kept here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any
from urllib.parse import parse_qs

import boto3
from botocore.awsrequest import AWSResponse

from gpuctl.stacks.clouds.aws.client import connecting
from tests.fakes.aws.recorded import query_refusal, refusal, response

_AT_LEAST_S = 40.0
"""That a pause lets pass, for the tests' sake."""
ENDING_S, NAT_S, ENDPOINT_S = 90.0, 150.0, 200.0
_XMLNS = 'xmlns="http://ec2.amazonaws.com/doc/2016-11-15/"'

Asked = dict[str, str]
Answer = tuple[int, str]


class StrictAws:
    """``connect`` gives clients of it; ``pause`` lets time pass."""

    def __init__(self, tags: dict[str, str], answers: Mapping[str, Answer] = MappingProxyType({})) -> None:
        """``tags``: of the placement group and the endpoint; ``answers``: instead of moto's, by operation."""
        region = "us-east-1"
        self.now = 0.0
        self.placement_groups: set[str] = set()
        self.endpoints: dict[str, str] = {}
        """Subnet by id."""
        self.deletes: list[str] = []
        """What was asked to go, in order, as ``DeleteVpc``, refused or not."""
        self._tags = tags
        self._answers = answers
        self._due: list[tuple[float, Callable[[], object]]] = []
        self._scheduled: set[str] = set()
        self._real = connecting()
        self._ec2 = boto3.client("ec2", region_name=region)
        self._groups = boto3.client("autoscaling", region_name=region)
        self._iam = boto3.client("iam", region_name=region)

    def connect(self, service: str, region: str) -> Any:
        client = self._real(service, region)
        name = client.meta.service_model.service_id.hyphenize()
        client.meta.events.register(f"before-send.{name}", self._answer)
        return client

    def pause(self, seconds: float) -> None:
        self.now += max(seconds, _AT_LEAST_S)
        due = [what for at, what in self._due if at <= self.now]
        self._due = [(at, what) for at, what in self._due if at > self.now]
        for what in due:
            what()

    def _answer(self, request: Any, **_: Any) -> AWSResponse | None:
        body = request.body if isinstance(request.body, str) else (request.body or b"").decode()
        asked = {key: values[0] for key, values in parse_qs(body).items()}
        action = asked.get("Action", "")
        if action.startswith(("Delete", "Terminate", "Release", "Detach", "Disassociate", "Revoke", "Remove")):
            self.deletes.append(action)
        if action in self._answers:
            return response(request.url, *self._answers[action])
        rule: Callable[[Asked], Answer | None] | None = getattr(self, f"_{action}", None)
        answer = rule(asked) if rule else None
        return response(request.url, *answer) if answer else None

    def _later(self, key: str, seconds: float, what: Callable[[], object]) -> Answer:
        if key not in self._scheduled:
            self._scheduled.add(key)
            self._due.append((self.now + seconds, what))
        return 200, f"<R {_XMLNS}><return>true</return></R>"

    # -- what takes time --------------------------------------------------------------------------------------------

    def _TerminateInstances(self, asked: Asked) -> Answer:  # noqa: N802 (AWS's names, here and below)
        name = asked["InstanceId.1"]
        return self._later(name, ENDING_S, lambda: self._ec2.terminate_instances(InstanceIds=[name]))

    def _DeleteAutoScalingGroup(self, asked: Asked) -> Answer | None:  # noqa: N802
        name = asked["AutoScalingGroupName"]
        groups = self._groups.describe_auto_scaling_groups(AutoScalingGroupNames=[name])["AutoScalingGroups"]
        if not groups:
            said = f"AutoScalingGroup name not found - AutoScalingGroup '{name}' not found"
            return query_refusal("ValidationError", said, 400)
        if groups[0]["Instances"] and asked.get("ForceDelete") != "true":
            return query_refusal(
                "ResourceInUse", "You cannot delete an AutoScalingGroup while there are instances", 400
            )
        return self._later(
            name,
            ENDING_S,
            lambda: self._groups.delete_auto_scaling_group(AutoScalingGroupName=name, ForceDelete=True),
        )

    def _DeleteNatGateway(self, asked: Asked) -> Answer:  # noqa: N802
        name = asked["NatGatewayId"]
        return self._later(name, NAT_S, lambda: self._nat_goes(name))

    def _nat_goes(self, name: str) -> None:
        (gateway,) = self._ec2.describe_nat_gateways(NatGatewayIds=[name])["NatGateways"]
        self._ec2.delete_nat_gateway(NatGatewayId=name)
        for used in gateway["NatGatewayAddresses"]:
            for address in self._ec2.describe_addresses(AllocationIds=[used["AllocationId"]])["Addresses"]:
                if association := address.get("AssociationId"):
                    self._ec2.disassociate_address(AssociationId=association)
            if card := used.get("NetworkInterfaceId"):
                self._ec2.delete_network_interface(NetworkInterfaceId=card)

    # -- what moto does not know, or does wrong ------------------------------------------------------------------------

    def _DescribeInstanceConnectEndpoints(self, _: Asked) -> Answer:  # noqa: N802
        items = "".join(
            f"<item><instanceConnectEndpointId>{name}</instanceConnectEndpointId><state>create-complete</state>"
            f"{self._tag_set()}</item>"
            for name in self.endpoints
        )
        return 200, f"<R {_XMLNS}><instanceConnectEndpointSet>{items}</instanceConnectEndpointSet></R>"

    def _DeleteInstanceConnectEndpoint(self, asked: Asked) -> Answer:  # noqa: N802
        name = asked["InstanceConnectEndpointId"]
        if name not in self.endpoints:
            return refusal("InvalidInstanceConnectEndpointId.NotFound", status=400)
        return self._later(name, ENDPOINT_S, lambda: self.endpoints.pop(name))

    def _DescribePlacementGroups(self, asked: Asked) -> Answer:  # noqa: N802
        if (named := asked.get("GroupName.1")) and named not in self.placement_groups:
            return refusal("InvalidPlacementGroup.Unknown", status=400)
        items = "".join(
            f"<item><groupName>{name}</groupName><state>available</state>{self._tag_set()}</item>"
            for name in self.placement_groups
        )
        return 200, f"<R {_XMLNS}><placementGroupSet>{items}</placementGroupSet></R>"

    def _DeletePlacementGroup(self, asked: Asked) -> Answer:  # noqa: N802
        """Moto forgets which one an instance is in: it is every one's of the cluster."""
        name = asked["GroupName"]
        if name not in self.placement_groups:
            return refusal("InvalidPlacementGroup.Unknown", status=400)
        if self._instances([{"Name": "tag:gpuctl:cluster", "Values": [self._tags["gpuctl:cluster"]]}]):
            return refusal("InvalidPlacementGroup.InUse", f"The placement group '{name}' is in use", 400)
        self.placement_groups.remove(name)
        return 200, f"<R {_XMLNS}><return>true</return></R>"

    def _DeleteKeyPair(self, asked: Asked) -> Answer:  # noqa: N802
        """Moto knows it by its name only; AWS takes either, and one that is not there is no error."""
        for pair in self._ec2.describe_key_pairs()["KeyPairs"]:
            if pair["KeyPairId"] == asked["KeyPairId"]:
                self._ec2.delete_key_pair(KeyName=pair["KeyName"])
        return 200, f"<R {_XMLNS}><return>true</return></R>"

    def _tag_set(self) -> str:
        items = "".join(f"<item><key>{key}</key><value>{value}</value></item>" for key, value in self._tags.items())
        return f"<tagSet>{items}</tagSet>"

    # -- what moto lets go too early ----------------------------------------------------------------------------------

    def _ReleaseAddress(self, asked: Asked) -> Answer | None:  # noqa: N802
        found = self._ec2.describe_addresses(AllocationIds=[asked["AllocationId"]])["Addresses"]
        if any(address.get("AssociationId") for address in found):
            return refusal("AuthFailure", "You do not have permission to access the specified resource.", 400)
        return None

    def _DeleteNetworkInterface(self, asked: Asked) -> Answer | None:  # noqa: N802
        name = asked["NetworkInterfaceId"]
        if any(one["InstanceId"] for one in self._attached([{"Name": "network-interface-id", "Values": [name]}])):
            return refusal("InvalidParameterValue", f"Network interface '{name}' is currently in use.", 400)
        return None

    def _DeleteSecurityGroup(self, asked: Asked) -> Answer | None:  # noqa: N802
        name = asked["GroupId"]
        rules = self._ec2.describe_security_group_rules()["SecurityGroupRules"]
        named = [one for one in rules if one.get("ReferencedGroupInfo", {}).get("GroupId") == name]
        used = self._attached([{"Name": "group-id", "Values": [name]}])
        if used or any(one["GroupId"] != name for one in named):
            return refusal("DependencyViolation", f"resource {name} has a dependent object", 400)
        return None

    def _DeleteSubnet(self, asked: Asked) -> Answer | None:  # noqa: N802
        name = asked["SubnetId"]
        within = [{"Name": "subnet-id", "Values": [name]}]
        gateways = self._ec2.describe_nat_gateways(Filters=within)["NatGateways"]
        live = [one for one in gateways if one["State"] != "deleted" and one["SubnetId"] == name]
        cards = self._ec2.describe_network_interfaces(Filters=within)["NetworkInterfaces"]
        ended = {one["InstanceId"] for one in self._instances(within, "terminated")}
        cards = [one for one in cards if one.get("Attachment", {}).get("InstanceId") not in ended or not ended]
        if live or cards or self._instances(within) or name in self.endpoints.values():
            return refusal("DependencyViolation", f"The subnet '{name}' has dependencies and cannot be deleted.", 400)
        return None

    def _DetachInternetGateway(self, asked: Asked) -> Answer | None:  # noqa: N802
        within = [{"Name": "vpc-id", "Values": [asked["VpcId"]]}]
        gateways = self._ec2.describe_nat_gateways(Filters=within)["NatGateways"]
        if any(one["State"] != "deleted" and one["VpcId"] == asked["VpcId"] for one in gateways):
            said = f"Network {asked['VpcId']} has some mapped public address(es)."
            return refusal("DependencyViolation", said, 400)
        return None

    def _DeleteVpc(self, asked: Asked) -> Answer | None:  # noqa: N802
        name = asked["VpcId"]
        within = [{"Name": "vpc-id", "Values": [name]}]
        attached = [{"Name": "attachment.vpc-id", "Values": [name]}]
        groups = self._ec2.describe_security_groups(Filters=within)["SecurityGroups"]
        endpoints = self._ec2.describe_vpc_endpoints(Filters=within)["VpcEndpoints"]
        if (
            [one for one in groups if one["GroupName"] != "default"]
            or [one for one in endpoints if one["State"].lower() != "deleted"]
            or self._ec2.describe_internet_gateways(Filters=attached)["InternetGateways"]
        ):
            return refusal("DependencyViolation", f"The vpc '{name}' has dependencies and cannot be deleted.", 400)
        return None

    def _DeleteRole(self, asked: Asked) -> Answer | None:  # noqa: N802
        name = asked["RoleName"]
        if (
            self._iam.list_role_policies(RoleName=name)["PolicyNames"]
            or self._iam.list_attached_role_policies(RoleName=name)["AttachedPolicies"]
            or self._iam.list_instance_profiles_for_role(RoleName=name)["InstanceProfiles"]
        ):
            return query_refusal("DeleteConflict", "Cannot delete entity, must delete policies first.", 409)
        return None

    def _instances(self, within: list[dict[str, Any]], *states: str) -> list[dict[str, Any]]:
        """That have not ended; or those in ``states``."""
        found = self._ec2.describe_instances(Filters=within)["Reservations"]
        every = [one for reservation in found for one in reservation["Instances"]]
        return [one for one in every if (one["State"]["Name"] in states if states else not _has_ended(one))]

    def _attached(self, within: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Attachments to machines that have not ended."""
        cards = self._ec2.describe_network_interfaces(Filters=within)["NetworkInterfaces"]
        attached = [one["Attachment"] for one in cards if one.get("Attachment", {}).get("InstanceId")]
        live = {one["InstanceId"] for one in self._instances([])}
        return [one for one in attached if one["InstanceId"] in live]


def _has_ended(instance: dict[str, Any]) -> bool:
    return bool(instance["State"]["Name"] == "terminated")
