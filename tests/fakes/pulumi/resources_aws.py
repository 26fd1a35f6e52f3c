"""What ``resource_plugin`` makes on AWS (``amazon``), by the requests that Terraform's provider would send: all that
the program declares."""

from __future__ import annotations

import json
import os
from collections.abc import Callable

from tests.fakes.aws.calls import Record, client, gone_or, named, of_iam, only, seen, tagged, tags
from tests.fakes.pulumi import resources_aws_network

AUTONAMED = (
    "aws:ec2/placementGroup:PlacementGroup",
    "aws:ec2/securityGroup:SecurityGroup",
    "aws:iam/rolePolicy:RolePolicy",
)
"""Where the program gives no ``name``, the plug-in makes one of the resource's own and some letters."""

# -- the bucket -------------------------------------------------------------------------------------------------------


def _bucket(inputs: Record) -> Record:
    name, region = inputs["bucket"], client("s3").meta.region_name
    elsewhere = {} if region == "us-east-1" else {"CreateBucketConfiguration": {"LocationConstraint": region}}
    # In us-east-1, S3 says yes to one's own bucket once more, and Terraform's provider looks before it makes.
    if _is_there(name):
        raise RuntimeError(f"creating S3 Bucket ({name}): BucketAlreadyExists")
    client("s3").create_bucket(Bucket=name, **elsewhere)
    client("s3").put_bucket_tagging(Bucket=name, Tagging={"TagSet": tags(inputs)})
    return {"id": name, "bucket": name, "arn": f"arn:aws:s3:::{name}"}


def _is_there(bucket: str) -> bool:
    return any(one["Name"] == bucket for one in client("s3").list_buckets()["Buckets"])


def _closed(inputs: Record) -> Record:
    keys = ("BlockPublicAcls", "BlockPublicPolicy", "IgnorePublicAcls", "RestrictPublicBuckets")
    told = {key: inputs[f"{key[0].lower()}{key[1:]}"] for key in keys}
    client("s3").put_public_access_block(Bucket=inputs["bucket"], PublicAccessBlockConfiguration=told)
    return {"id": inputs["bucket"]}


def _encrypted(inputs: Record) -> Record:
    rules = [
        {"ApplyServerSideEncryptionByDefault": {"SSEAlgorithm": _by_default(rule)["sseAlgorithm"]}}
        for rule in inputs["rules"]
    ]
    told = {"Rules": rules}
    client("s3").put_bucket_encryption(Bucket=inputs["bucket"], ServerSideEncryptionConfiguration=told)
    return {"id": inputs["bucket"]}


def _by_default(rule: Record) -> Record:
    return dict(rule["applyServerSideEncryptionByDefault"])


def _swept(inputs: Record) -> Record:
    rules = [
        {
            "ID": rule["id"],
            "Status": rule["status"],
            "Filter": {"Prefix": ""},
            "AbortIncompleteMultipartUpload": {
                "DaysAfterInitiation": int(rule["abortIncompleteMultipartUpload"]["daysAfterInitiation"])
            },
        }
        for rule in inputs["rules"]
    ]
    client("s3").put_bucket_lifecycle_configuration(Bucket=inputs["bucket"], LifecycleConfiguration={"Rules": rules})
    return {"id": inputs["bucket"]}


def _policy_of_bucket(inputs: Record) -> Record:
    """Not sent: moto does not read conditions, and refuses everybody what is refused without TLS."""
    json.loads(inputs["policy"])
    client("s3").head_bucket(Bucket=inputs["bucket"])
    return {"id": inputs["bucket"]}


# -- the machines -----------------------------------------------------------------------------------------------------


def _key(inputs: Record) -> Record:
    name = f"{inputs['keyNamePrefix']}{os.urandom(4).hex()}"
    told = {"PublicKeyMaterial": inputs["publicKey"], "TagSpecifications": tagged(inputs, "key-pair")}
    client("ec2").import_key_pair(KeyName=name, **told)
    return {"id": name, "keyName": name}


def _side_by_side(inputs: Record) -> Record:
    told = {"Strategy": inputs["strategy"], "TagSpecifications": tagged(inputs, "placement-group")}
    client("ec2").create_placement_group(GroupName=inputs["name"], **told)
    return {"id": inputs["name"], "name": inputs["name"]}


def _template(inputs: Record) -> Record:
    made = client("ec2").create_launch_template(
        LaunchTemplateName=named(inputs),
        LaunchTemplateData=_launched(inputs),
        TagSpecifications=tagged(inputs, "launch-template"),
    )
    return {"id": made["LaunchTemplate"]["LaunchTemplateId"], "latestVersion": 1}


def _launched(inputs: Record) -> Record:
    """Without what machines are told, which moto's groups do not take."""
    return {"InstanceType": inputs["instanceType"], "ImageId": "ami-12c6146b"}


def _change_template(id_: str, before: Record, inputs: Record) -> Record:
    """A new version of it, which is the default one from then on."""
    only({"userData", "tagSpecifications", "tags", "keyName"}, before, inputs)
    made = client("ec2").create_launch_template_version(LaunchTemplateId=id_, LaunchTemplateData=_launched(inputs))
    client("ec2").create_tags(Resources=[id_], Tags=tags(inputs))
    return {"latestVersion": made["LaunchTemplateVersion"]["VersionNumber"]}


def _group(inputs: Record) -> Record:
    name = named(inputs)
    beside = {"PlacementGroup": inputs["placementGroup"]} if inputs.get("placementGroup") else {}
    client("autoscaling").create_auto_scaling_group(
        AutoScalingGroupName=name,
        LaunchTemplate=_version(inputs),
        MinSize=int(inputs["minSize"]),
        MaxSize=int(inputs["maxSize"]),
        DesiredCapacity=int(inputs["desiredCapacity"]),
        VPCZoneIdentifier=",".join(inputs["vpcZoneIdentifiers"]),
        Tags=_group_tags(name, inputs),
        **beside,
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
    only({"minSize", "maxSize", "mixedInstancesPolicy", "tags"}, before, inputs)
    sizes = {
        name: int(inputs[key])
        for key, name in (("minSize", "MinSize"), ("maxSize", "MaxSize"))
        if before[key] != inputs[key]
    }
    asg = client("autoscaling")
    asg.update_auto_scaling_group(AutoScalingGroupName=id_, LaunchTemplate=_version(inputs), **sizes)
    asg.create_or_update_tags(Tags=_group_tags(id_, inputs))
    return {}


def _no_group(id_: str) -> None:
    if _GROUP_SEEN(id_):
        client("autoscaling").delete_auto_scaling_group(AutoScalingGroupName=id_, ForceDelete=True)


# -- what they may do -------------------------------------------------------------------------------------------------


def _role(inputs: Record) -> Record:
    name = named(inputs)
    told = {"AssumeRolePolicyDocument": inputs["assumeRolePolicy"], "Tags": tags(inputs)}
    made = client("iam").create_role(RoleName=name, **told)["Role"]
    return {"id": name, "name": name, "arn": made["Arn"]}


def _no_role(id_: str, state: Record) -> None:
    """Terraform's provider takes away what it does not know of only if it was told so."""

    def unmake(name: str) -> None:
        if state.get("forceDetachPolicies"):
            for policy in client("iam").list_role_policies(RoleName=name)["PolicyNames"]:
                client("iam").delete_role_policy(RoleName=name, PolicyName=policy)
        client("iam").delete_role(RoleName=name)

    gone_or(unmake)(id_, state)


def _role_policy(inputs: Record) -> Record:
    role, name = inputs["role"], inputs["name"]
    client("iam").put_role_policy(RoleName=role, PolicyName=name, PolicyDocument=inputs["policy"])
    return {"id": f"{role}:{name}"}


def _no_role_policy(id_: str) -> None:
    role, _, name = id_.partition(":")
    client("iam").delete_role_policy(RoleName=role, PolicyName=name)


def _change_role_policy(_: str, before: Record, inputs: Record) -> Record:
    only({"policy"}, before, inputs)
    _role_policy(inputs)
    return {}


def _profile(inputs: Record) -> Record:
    name = named(inputs)
    made = client("iam").create_instance_profile(InstanceProfileName=name, Tags=tags(inputs))["InstanceProfile"]
    client("iam").add_role_to_instance_profile(InstanceProfileName=name, RoleName=inputs["role"])
    return {"id": name, "name": name, "arn": made["Arn"]}


def _no_profile(id_: str) -> None:
    found = client("iam").get_instance_profile(InstanceProfileName=id_)["InstanceProfile"]
    for role in found["Roles"]:
        client("iam").remove_role_from_instance_profile(InstanceProfileName=id_, RoleName=role["RoleName"])
    client("iam").delete_instance_profile(InstanceProfileName=id_)


_TEMPLATE = "aws:ec2/launchTemplate:LaunchTemplate"
_ASG = "aws:autoscaling/group:Group"
_GROUP_SEEN = seen("autoscaling", "describe_auto_scaling_groups", "AutoScalingGroupNames", "AutoScalingGroups")

MAKERS: dict[str, Callable[[Record], Record]] = {
    **resources_aws_network.MAKERS,
    "aws:s3/bucket:Bucket": _bucket,
    "aws:s3/bucketPublicAccessBlock:BucketPublicAccessBlock": _closed,
    "aws:s3/bucketServerSideEncryptionConfiguration:BucketServerSideEncryptionConfiguration": _encrypted,
    "aws:s3/bucketLifecycleConfiguration:BucketLifecycleConfiguration": _swept,
    "aws:s3/bucketPolicy:BucketPolicy": _policy_of_bucket,
    "aws:ec2/keyPair:KeyPair": _key,
    "aws:ec2/placementGroup:PlacementGroup": _side_by_side,
    _TEMPLATE: _template,
    _ASG: _group,
    "aws:iam/role:Role": _role,
    "aws:iam/rolePolicy:RolePolicy": _role_policy,
    "aws:iam/instanceProfile:InstanceProfile": _profile,
}
UPDATERS: dict[str, Callable[[str, Record, Record], Record]] = {
    **resources_aws_network.UPDATERS,
    _TEMPLATE: _change_template,
    _ASG: _change_group,
    "aws:iam/rolePolicy:RolePolicy": _change_role_policy,
}
UNMAKERS: dict[str, Callable[[str, Record], object]] = {
    **resources_aws_network.UNMAKERS,
    "aws:iam/role:Role": _no_role,
    **{
        kind: gone_or(unmake)
        for kind, unmake in {
            "aws:ec2/keyPair:KeyPair": lambda id_: client("ec2").delete_key_pair(KeyName=id_),
            "aws:ec2/placementGroup:PlacementGroup": lambda id_: client("ec2").delete_placement_group(GroupName=id_),
            _TEMPLATE: lambda id_: client("ec2").delete_launch_template(LaunchTemplateId=id_),
            _ASG: _no_group,
            "aws:iam/rolePolicy:RolePolicy": _no_role_policy,
            "aws:iam/instanceProfile:InstanceProfile": _no_profile,
        }.items()
    },
}
SEEN: dict[str, Callable[[str], bool]] = {
    **resources_aws_network.SEEN,
    **{kind: _is_there for kind in MAKERS if kind.startswith("aws:s3/")},
    "aws:ec2/keyPair:KeyPair": seen("ec2", "describe_key_pairs", "KeyNames", "KeyPairs"),
    "aws:ec2/placementGroup:PlacementGroup": seen("ec2", "describe_placement_groups", "GroupNames", "PlacementGroups"),
    "aws:iam/role:Role": of_iam("get_role", "RoleName"),
    "aws:iam/rolePolicy:RolePolicy": of_iam("get_role_policy", "RoleName", "PolicyName"),
    "aws:iam/instanceProfile:InstanceProfile": of_iam("get_instance_profile", "InstanceProfileName"),
    _TEMPLATE: seen("ec2", "describe_launch_templates", "LaunchTemplateIds", "LaunchTemplates"),
    _ASG: _GROUP_SEEN,
}
