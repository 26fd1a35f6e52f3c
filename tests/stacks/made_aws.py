"""What ``pulumi_cli`` makes on a moto server: as much as the rest of gpuctl asks for there."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import boto3

Record = dict[str, Any]


def _client(service: str) -> Any:
    return boto3.client(service, region_name="us-east-1")


def _tags(inputs: Record) -> list[dict[str, str]]:
    return [{"Key": key, "Value": value} for key, value in inputs.get("tags", {}).items()]


def _tagged(inputs: Record, kind: str) -> list[Record]:
    return [{"ResourceType": kind, "Tags": _tags(inputs)}]


def _bucket(inputs: Record) -> Record:
    _client("s3").create_bucket(Bucket=inputs["bucket"])
    return {"id": inputs["bucket"], "bucket": inputs["bucket"], "arn": f"arn:aws:s3:::{inputs['bucket']}"}


def _vpc(inputs: Record) -> Record:
    made = _client("ec2").create_vpc(CidrBlock=inputs["cidrBlock"], TagSpecifications=_tagged(inputs, "vpc"))
    return {"id": made["Vpc"]["VpcId"]}


def _subnet(inputs: Record) -> Record:
    made = _client("ec2").create_subnet(
        VpcId=inputs["vpcId"],
        CidrBlock=inputs["cidrBlock"],
        AvailabilityZone=inputs["availabilityZone"],
        TagSpecifications=_tagged(inputs, "subnet"),
    )
    return {"id": made["Subnet"]["SubnetId"]}


def _security_group(inputs: Record) -> Record:
    made = _client("ec2").create_security_group(
        GroupName=f"g-{inputs['vpcId']}",
        Description="a test",
        VpcId=inputs["vpcId"],
        TagSpecifications=_tagged(inputs, "security-group"),
    )
    group = boto3.resource("ec2", region_name="us-east-1").SecurityGroup(made["GroupId"])
    group.revoke_egress(IpPermissions=group.ip_permissions_egress)  # Terraform's provider begins with none
    return {"id": group.id}


def _rule(direction: str, inputs: Record) -> Record:
    made = getattr(_client("ec2"), f"authorize_security_group_{direction}")(
        GroupId=inputs["securityGroupId"], IpPermissions=[_permission(inputs)]
    )
    id_ = made["SecurityGroupRules"][0]["SecurityGroupRuleId"]
    return {"id": f"{inputs['securityGroupId']} {id_}"}


def _permission(inputs: Record) -> Record:
    about = {"Description": inputs["description"]}
    found: Record = {"IpProtocol": inputs["ipProtocol"]}
    if "fromPort" in inputs:
        found |= {"FromPort": int(inputs["fromPort"]), "ToPort": int(inputs["toPort"])}
    if "cidrIpv4" in inputs:
        return {**found, "IpRanges": [{"CidrIp": inputs["cidrIpv4"], **about}]}
    return {**found, "UserIdGroupPairs": [{"GroupId": inputs["referencedSecurityGroupId"], **about}]}


def _no_rule(direction: str, id_: str) -> None:
    group, _, rule = id_.partition(" ")
    getattr(_client("ec2"), f"revoke_security_group_{direction}")(GroupId=group, SecurityGroupRuleIds=[rule])


def _change_rule(id_: str, before: Record, inputs: Record) -> Record:
    _only({"cidrIpv4"}, before, inputs)
    group, _, rule = id_.partition(" ")
    wanted = {
        "IpProtocol": inputs["ipProtocol"],
        "FromPort": int(inputs["fromPort"]),
        "ToPort": int(inputs["toPort"]),
        "CidrIpv4": inputs["cidrIpv4"],
    }
    _client("ec2").modify_security_group_rules(
        GroupId=group, SecurityGroupRules=[{"SecurityGroupRuleId": rule, "SecurityGroupRule": wanted}]
    )
    return {}


def _template(inputs: Record) -> Record:
    made = _client("ec2").create_launch_template(
        LaunchTemplateName=f"{inputs['namePrefix']}{os.urandom(4).hex()}",
        LaunchTemplateData=_launched(inputs),
        TagSpecifications=_tagged(inputs, "launch-template"),
    )
    return {"id": made["LaunchTemplate"]["LaunchTemplateId"], "latestVersion": 1}


def _launched(inputs: Record) -> Record:
    """Without what machines are told, which moto's groups do not take."""
    return {"InstanceType": inputs["instanceType"], "ImageId": "ami-12c6146b"}


def _change_template(id_: str, before: Record, inputs: Record) -> Record:
    """A new version of it, which is the default one from then on."""
    _only({"userData", "tagSpecifications", "tags"}, before, inputs)
    client = _client("ec2")
    made = client.create_launch_template_version(LaunchTemplateId=id_, LaunchTemplateData=_launched(inputs))
    client.create_tags(Resources=[id_], Tags=_tags(inputs))
    return {"latestVersion": made["LaunchTemplateVersion"]["VersionNumber"]}


def _group(inputs: Record) -> Record:
    name = f"{inputs['namePrefix']}{os.urandom(4).hex()}"
    _client("autoscaling").create_auto_scaling_group(
        AutoScalingGroupName=name,
        LaunchTemplate=_version(inputs),
        MinSize=int(inputs["minSize"]),
        MaxSize=int(inputs["maxSize"]),
        DesiredCapacity=int(inputs["desiredCapacity"]),
        VPCZoneIdentifier=",".join(inputs["vpcZoneIdentifiers"]),
        Tags=_group_tags(name, inputs),
    )
    return {"id": name, "name": name}


def _version(inputs: Record) -> Record:
    said = inputs["mixedInstancesPolicy"]["launchTemplate"]["launchTemplateSpecification"]
    return {"LaunchTemplateId": said["launchTemplateId"], "Version": said["version"]}


def _group_tags(name: str, inputs: Record) -> list[Record]:
    about = {"PropagateAtLaunch": True, "ResourceId": name, "ResourceType": "auto-scaling-group"}
    return [{"Key": tag["key"], "Value": tag["value"], **about} for tag in inputs["tags"]]


def _change_group(id_: str, before: Record, inputs: Record) -> Record:
    """Only what has changed, as Terraform's provider does; moto forgets the template if it is not told again."""
    _only({"minSize", "maxSize", "mixedInstancesPolicy", "tags"}, before, inputs)
    sizes = {
        name: int(inputs[key])
        for key, name in (("minSize", "MinSize"), ("maxSize", "MaxSize"))
        if before[key] != inputs[key]
    }
    client = _client("autoscaling")
    client.update_auto_scaling_group(AutoScalingGroupName=id_, LaunchTemplate=_version(inputs), **sizes)
    client.create_or_update_tags(Tags=_group_tags(id_, inputs))
    return {}


def _only(keys: set[str], before: Record, inputs: Record) -> None:
    if other := {key for key in {*before, *inputs} if before.get(key) != inputs.get(key)} - keys:
        raise NotImplementedError(f"the stand-in cannot update {', '.join(sorted(other))}")


MAKERS: dict[str, Callable[[Record], Record]] = {
    "aws:s3/bucket:Bucket": _bucket,
    "aws:ec2/vpc:Vpc": _vpc,
    "aws:ec2/subnet:Subnet": _subnet,
    "aws:ec2/securityGroup:SecurityGroup": _security_group,
    "aws:vpc/securityGroupIngressRule:SecurityGroupIngressRule": partial(_rule, "ingress"),
    "aws:vpc/securityGroupEgressRule:SecurityGroupEgressRule": partial(_rule, "egress"),
    "aws:ec2/launchTemplate:LaunchTemplate": _template,
    "aws:autoscaling/group:Group": _group,
}
UPDATERS: dict[str, Callable[[str, Record, Record], Record]] = {
    "aws:vpc/securityGroupIngressRule:SecurityGroupIngressRule": _change_rule,
    "aws:ec2/launchTemplate:LaunchTemplate": _change_template,
    "aws:autoscaling/group:Group": _change_group,
}
UNMAKERS: dict[str, Callable[[str], object]] = {
    "aws:ec2/vpc:Vpc": lambda id_: _client("ec2").delete_vpc(VpcId=id_),
    "aws:ec2/subnet:Subnet": lambda id_: _client("ec2").delete_subnet(SubnetId=id_),
    "aws:ec2/securityGroup:SecurityGroup": lambda id_: _client("ec2").delete_security_group(GroupId=id_),
    "aws:vpc/securityGroupIngressRule:SecurityGroupIngressRule": partial(_no_rule, "ingress"),
    "aws:vpc/securityGroupEgressRule:SecurityGroupEgressRule": partial(_no_rule, "egress"),
    "aws:ec2/launchTemplate:LaunchTemplate": lambda id_: _client("ec2").delete_launch_template(LaunchTemplateId=id_),
    "aws:autoscaling/group:Group": lambda id_: _client("autoscaling").delete_auto_scaling_group(
        AutoScalingGroupName=id_, ForceDelete=True
    ),
}
