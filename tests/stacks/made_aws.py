"""What ``pulumi_cli`` makes on a moto server: as much as the rest of gpuctl asks for there."""

from __future__ import annotations

import os
from collections.abc import Callable
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
    return {"id": made["GroupId"]}


def _template(inputs: Record) -> Record:
    made = _client("ec2").create_launch_template(
        LaunchTemplateName=f"{inputs['namePrefix']}{os.urandom(4).hex()}",
        LaunchTemplateData={"InstanceType": inputs["instanceType"], "ImageId": "ami-12c6146b"},
        TagSpecifications=_tagged(inputs, "launch-template"),
    )
    return {"id": made["LaunchTemplate"]["LaunchTemplateId"], "latestVersion": 1}


def _group(inputs: Record) -> Record:
    name = f"{inputs['namePrefix']}{os.urandom(4).hex()}"
    template = inputs["mixedInstancesPolicy"]["launchTemplate"]["launchTemplateSpecification"]
    tags = [
        {"Key": tag["key"], "Value": tag["value"], "PropagateAtLaunch": True, "ResourceId": name}
        for tag in inputs["tags"]
    ]
    _client("autoscaling").create_auto_scaling_group(
        AutoScalingGroupName=name,
        LaunchTemplate={"LaunchTemplateId": template["launchTemplateId"]},
        MinSize=0,
        MaxSize=int(inputs["maxSize"]),
        DesiredCapacity=int(inputs["desiredCapacity"]),
        VPCZoneIdentifier=",".join(inputs["vpcZoneIdentifiers"]),
        Tags=tags,
    )
    return {"id": name, "name": name}


MAKERS: dict[str, Callable[[Record], Record]] = {
    "aws:s3/bucket:Bucket": _bucket,
    "aws:ec2/vpc:Vpc": _vpc,
    "aws:ec2/subnet:Subnet": _subnet,
    "aws:ec2/securityGroup:SecurityGroup": _security_group,
    "aws:ec2/launchTemplate:LaunchTemplate": _template,
    "aws:autoscaling/group:Group": _group,
}
UNMAKERS: dict[str, Callable[[str], object]] = {
    "aws:ec2/vpc:Vpc": lambda id_: _client("ec2").delete_vpc(VpcId=id_),
    "aws:ec2/subnet:Subnet": lambda id_: _client("ec2").delete_subnet(SubnetId=id_),
    "aws:ec2/securityGroup:SecurityGroup": lambda id_: _client("ec2").delete_security_group(GroupId=id_),
    "aws:ec2/launchTemplate:LaunchTemplate": lambda id_: _client("ec2").delete_launch_template(LaunchTemplateId=id_),
    "aws:autoscaling/group:Group": lambda id_: _client("autoscaling").delete_auto_scaling_group(
        AutoScalingGroupName=id_, ForceDelete=True
    ),
}
