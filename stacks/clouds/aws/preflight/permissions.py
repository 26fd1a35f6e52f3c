"""Checks that these credentials may call what ``up`` and ``down`` call, on what those would make.

By IAM's own simulation, with the names and tags that the resources will have: so a user passes whose rights end at
``role/gpuctl-*``. What the simulation cannot know is no refusal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from gpuctl.cluster.errors import GpuctlError
from gpuctl.stacks.catalog.instance_types import MachineType
from gpuctl.stacks.clouds.answers import CredentialsRefused, PreflightCheck
from gpuctl.stacks.clouds.aws import has_public_address
from gpuctl.stacks.clouds.aws.client import Connect, understood
from gpuctl.stacks.clouds.aws.partition import console, home, partition
from gpuctl.stacks.request.stack_request import StackRequest

_ID = "0123456789abcdef0"
"""Stands for what AWS will call something."""


class Right(NamedTuple):
    """Permission for some actions on one resource."""

    resource: str
    """ARN."""
    actions: tuple[str, ...]


def rights(request: StackRequest, machine: MachineType, account: str) -> Iterator[Right]:
    """The rights to what ``up`` and ``down`` call for this request (see ``network``, ``identity``, ``storage``,
    ``group``), without what goes with it."""
    part, named = partition(request.region), f"gpuctl-{request.cluster}-{_ID}"

    def ec2(resource: str, *actions: str) -> Right:
        place = f"arn:{part}:ec2:{request.region}:{account}"
        return Right(f"{place}:{resource}", tuple(f"ec2:{action}" for action in actions))

    yield ec2(f"vpc/vpc-{_ID}", "CreateVpc", "DeleteVpc", "CreateTags")
    yield ec2(f"subnet/subnet-{_ID}", "CreateSubnet", "DeleteSubnet")
    yield ec2(f"route-table/rtb-{_ID}", "CreateRouteTable", "DeleteRouteTable")
    yield ec2(f"internet-gateway/igw-{_ID}", "CreateInternetGateway", "DeleteInternetGateway")
    yield ec2(f"vpc-endpoint/vpce-{_ID}", "CreateVpcEndpoint", "DeleteVpcEndpoints")
    yield ec2(
        f"security-group/sg-{_ID}",
        *("CreateSecurityGroup", "DeleteSecurityGroup"),
        *("AuthorizeSecurityGroupIngress", "AuthorizeSecurityGroupEgress"),
    )
    yield ec2(f"launch-template/lt-{_ID}", "CreateLaunchTemplate", "DeleteLaunchTemplate")
    yield ec2(f"instance/i-{_ID}", "RunInstances", "TerminateInstances")
    if not has_public_address(machine):
        yield ec2(f"elastic-ip/eipalloc-{_ID}", "AllocateAddress", "ReleaseAddress")
        yield ec2(f"natgateway/nat-{_ID}", "CreateNatGateway", "DeleteNatGateway")
        if request.ssh_from:
            yield ec2(
                f"instance-connect-endpoint/eice-{_ID}",
                *("CreateInstanceConnectEndpoint", "DeleteInstanceConnectEndpoint"),
            )
    if machine.fabric == "efa" and request.placement:
        yield ec2(f"placement-group/{request.cluster}", "CreatePlacementGroup", "DeletePlacementGroup")
    if request.ssh_key:
        yield ec2(f"key-pair/{named}", "ImportKeyPair", "DeleteKeyPair")
    group = f"autoScalingGroup:*:autoScalingGroupName/{named}"
    calls = ("CreateAutoScalingGroup", "UpdateAutoScalingGroup", "SetDesiredCapacity", "DeleteAutoScalingGroup")
    yield Right(
        f"arn:{part}:autoscaling:{request.region}:{account}:{group}", tuple(f"autoscaling:{call}" for call in calls)
    )
    role = ("CreateRole", "DeleteRole", "TagRole", "PutRolePolicy", "DeleteRolePolicy", "PassRole")
    yield Right(f"arn:{part}:iam::{account}:role/{named}", tuple(f"iam:{call}" for call in role))
    profile = ("CreateInstanceProfile", "DeleteInstanceProfile", "AddRoleToInstanceProfile")
    yield Right(f"arn:{part}:iam::{account}:instance-profile/{named}", tuple(f"iam:{call}" for call in profile))
    if not request.bucket or request.is_own(request.bucket):
        made = ("CreateBucket", "PutBucketPolicy", "PutEncryptionConfiguration", "PutLifecycleConfiguration")
        bucket = (*made, "PutBucketPublicAccessBlock", "PutBucketTagging")
        yield Right(f"arn:{part}:s3:::{request.place().name}", tuple(f"s3:{call}" for call in bucket))
    if not request.image:
        image = "parameter/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id"
        yield Right(f"arn:{part}:ssm:{request.region}::{image}", ("ssm:GetParameter",))


def permissions(
    connect: Connect, request: StackRequest, machine: MachineType, caller: dict[str, str]
) -> PreflightCheck:
    """Check permissions by simulation, or by dry-run calls where IAM cannot or may not simulate.

    Args:
        connect: makes the clients of boto3.
        request: the cluster that ``up`` would make: the simulation uses its names, tags and region.
        machine: the catalog's entry for the request's type, on which depends what else is made, such as a NAT gateway.
        caller: ``Account`` and ``Arn`` of the credentials (see ``client.who``).
    """
    if caller["Arn"].endswith(":root"):
        return PreflightCheck.ok("permissions", "the account's root may do everything")
    wanted = list(rights(request, machine, caller["Account"]))
    iam = connect("iam", home(request.region))
    try:
        with understood():
            source = _policy_source(iam, caller["Arn"])
            results = [one for right in wanted for one in _simulated(iam, source, right, request)]
    except CredentialsRefused:
        raise
    except GpuctlError:
        return _rehearsed(connect("ec2", request.region), f"{console(request.region)}/iam/home")
    denied = {one["EvalActionName"]: one for one in results if one["EvalDecision"] != "allowed"}
    # A condition on something that only a real call has, such as a log-in with a second factor, proves nothing.
    sure = [action + _who_denies(one) for action, one in denied.items() if not one.get("MissingContextValues")]
    if sure:
        more = f" and {len(sure) - 4} more" if len(sure) > 4 else ""
        page = f"{console(request.region)}/iam/home"
        return PreflightCheck.fail("permissions", f"these credentials may not call {', '.join(sure[:4])}{more}", page)
    if denied:
        missing = sorted({key for one in denied.values() for key in one["MissingContextValues"]})
        told = f"whether they may call {', '.join(list(denied)[:4])} depends on {', '.join(missing)}"
        return PreflightCheck(name="permissions", status="unknown", message=told)
    return PreflightCheck.ok("permissions", f"all {sum(len(right.actions) for right in wanted)} that up and down need")


def _policy_source(iam: Any, arn: str) -> str:
    """The role, of a session of one: that does not tell the role's path."""
    return str(iam.get_role(RoleName=arn.split("/")[1])["Role"]["Arn"]) if ":assumed-role/" in arn else arn


def _simulated(iam: Any, source: str, right: Right, request: StackRequest) -> Iterator[dict[str, Any]]:
    """IAM takes a resource of ``*`` where none is named, which a policy for ``role/gpuctl-*`` does not allow."""
    pages = iam.get_paginator("simulate_principal_policy").paginate(
        PolicySourceArn=source,
        ActionNames=list(right.actions),
        ResourceArns=[right.resource],
        ContextEntries=[
            {"ContextKeyName": key, "ContextKeyType": "string", "ContextKeyValues": [value]}
            for key, value in _context(request).items()
        ],
    )
    for page in pages:
        yield from (one for one in page["EvaluationResults"] if one["EvalActionName"] in right.actions)


def _context(request: StackRequest) -> dict[str, str]:
    """The context that conditions in policies are usually about, as it will be."""
    tags = request.tags()
    return {
        "aws:RequestedRegion": request.region,
        "iam:PassedToService": "ec2.amazonaws.com",
        "ec2:InstanceType": request.type,
        "ec2:Region": request.region,
        **{f"aws:RequestTag/{key}": value for key, value in tags.items()},
        **{f"aws:ResourceTag/{key}": value for key, value in tags.items()},
        **{f"ec2:ResourceTag/{key}": value for key, value in tags.items()},
        **{f"autoscaling:ResourceTag/{key}": value for key, value in tags.items()},
    }


def _who_denies(result: dict[str, Any]) -> str:
    """Besides the user's own policies."""
    if result.get("OrganizationsDecisionDetail", {}).get("AllowedByOrganizations") is False:
        return " (by a policy of the organization)"
    if result.get("PermissionsBoundaryDecisionDetail", {}).get("AllowedByPermissionsBoundary") is False:
        return " (by the permissions boundary)"
    return ""


def _rehearsed(ec2: Any, page: str) -> PreflightCheck:
    rehearsals = {
        "ec2:CreateVpc": lambda: ec2.create_vpc(CidrBlock="10.77.0.0/16", DryRun=True),
        "ec2:AllocateAddress": lambda: ec2.allocate_address(Domain="vpc", DryRun=True),
        "ec2:CreateInternetGateway": lambda: ec2.create_internet_gateway(DryRun=True),
    }
    if denied := [action for action, rehearse in rehearsals.items() if not _may(ec2, rehearse)]:
        return PreflightCheck.fail("permissions", f"these credentials may not call {', '.join(denied)}", page)
    return PreflightCheck(
        name="permissions",
        status="unknown",
        message="networks may be created; IAM does not show these credentials the rest",
    )


def _may(ec2: Any, rehearse: Callable[[], object]) -> bool:
    try:
        rehearse()
    except ec2.exceptions.ClientError as error:
        code = error.response["Error"]["Code"]
        if code not in ("DryRunOperation", "UnauthorizedOperation"):
            raise
        return bool(code == "DryRunOperation")
    return True


# -- quota ------------------------------------------------------------------------------------------------------------
