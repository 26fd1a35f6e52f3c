"""Whether an account would get what a request wants: credentials, region, machines in the zone, rights, quota.

Nothing is created. Capacity at this moment is not told: AWS knows it only when it starts a machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from gpuctl.cluster.errors import GpuctlError
from gpuctl.stacks.aws.account import Connect, connecting, understood, who
from gpuctl.stacks.cloud import Check, CredentialsRefused, Denied
from gpuctl.stacks.machines import MachineType
from gpuctl.stacks.request import StackRequest

_CONSOLE = "https://console.aws.amazon.com"
_RIGHTS = (
    *("ec2:CreateVpc", "ec2:DeleteVpc", "ec2:CreateSubnet", "ec2:DeleteSubnet", "ec2:CreateRouteTable"),
    *("ec2:CreateInternetGateway", "ec2:CreateNatGateway", "ec2:AllocateAddress", "ec2:ReleaseAddress"),
    *("ec2:CreateVpcEndpoint", "ec2:CreateInstanceConnectEndpoint", "ec2:CreateSecurityGroup"),
    *("ec2:AuthorizeSecurityGroupIngress", "ec2:AuthorizeSecurityGroupEgress", "ec2:CreatePlacementGroup"),
    *("ec2:CreateLaunchTemplate", "ec2:ImportKeyPair", "ec2:CreateTags", "ec2:RunInstances"),
    *("ec2:TerminateInstances", "autoscaling:CreateAutoScalingGroup", "autoscaling:UpdateAutoScalingGroup"),
    *("autoscaling:DeleteAutoScalingGroup", "iam:CreateRole", "iam:DeleteRole", "iam:PutRolePolicy", "iam:PassRole"),
    *("iam:CreateInstanceProfile", "iam:AddRoleToInstanceProfile", "s3:CreateBucket", "s3:PutBucketPolicy"),
    *("s3:PutEncryptionConfiguration", "s3:PutLifecycleConfiguration", "s3:PutBucketPublicAccessBlock"),
    "ssm:GetParameter",
)
"""What ``up`` and ``down`` call (see ``network``, ``identity``, ``storage``, ``group``), without what goes with it."""


def quota_code(family: str, *, spot: bool) -> str:
    """Of the quota, in vCPUs, that machines of a family such as ``p4d`` count against; empty if none is known. AWS's
    "Amazon EC2 service quotas": *Running On-Demand P instances* and its like."""
    if family.startswith(("g", "vt")):
        return "L-3819A6DF" if spot else "L-DB2E81BA"
    if family.startswith("p") and not spot:
        return "L-417A185B"
    if family.startswith("p5"):
        return "L-C4BD4855"
    return "L-7212CCBC" if family.startswith(("p2", "p3", "p4")) else ""


def checks(request: StackRequest, machine: MachineType, connect: Connect | None = None) -> list[Check]:
    """All at once, but for credentials: without them nothing else can be asked."""
    try:
        connect = connect or connecting()
        caller = who(connect, request.region)
    except CredentialsRefused as error:
        return [Check.fail("credentials", str(error), f"{_CONSOLE}/iam/home#/security_credentials")]
    except GpuctlError as error:
        return [Check.fail("region", str(error), f"{_CONSOLE}/billing/home#/account")]
    ec2 = connect("ec2", request.region)
    return [
        _credentials(request, caller),
        Check.of("region", understood()(lambda: _region(request, ec2))),
        Check.of("machines", understood()(lambda: _machines(request, ec2))),
        Check.of("permissions", understood()(lambda: _permissions(connect, request, caller["Arn"]))),
        Check.of("quota", understood()(lambda: _quota(request, machine, connect, ec2))),
    ]


def _credentials(request: StackRequest, caller: dict[str, str]) -> Check:
    if request.account and request.account != caller["Account"]:
        return Check.fail("credentials", f"they are of account {caller['Account']}, and not of {request.account}")
    return Check.ok("credentials", f"account {caller['Account']}, {caller['Arn']}")


def _region(request: StackRequest, ec2: Any) -> Check:
    (region,) = ec2.describe_regions(RegionNames=[request.region], AllRegions=True)["Regions"]
    if region.get("OptInStatus") == "not-opted-in":
        return Check.fail("region", f"{request.region} is not enabled", f"{_CONSOLE}/billing/home#/account")
    return Check.ok("region", request.region)


def _machines(request: StackRequest, ec2: Any) -> Check:
    pages = ec2.get_paginator("describe_instance_type_offerings").paginate(
        LocationType="availability-zone", Filters=[{"Name": "instance-type", "Values": [request.type]}]
    )
    zones = sorted({offer["Location"] for page in pages for offer in page["InstanceTypeOfferings"]})
    if not zones:
        return Check.fail(
            "machines", f"there is no {request.type} in {request.region}; take another --region or --type"
        )
    if missing := [zone for zone in request.zones if zone not in zones]:
        return Check.fail(
            "machines", f"there is no {request.type} in {', '.join(missing)}; --zone {' or '.join(zones)} has it"
        )
    return Check.ok("machines", f"{request.type} is sold in {', '.join(request.zones or zones)}")


# -- rights -----------------------------------------------------------------------------------------------------------


def _permissions(connect: Connect, request: StackRequest, arn: str) -> Check:
    """By IAM's own simulation; by calls that are only rehearsed, where that may not be asked."""
    if arn.endswith(":root"):
        return Check.ok("permissions", "the account's root may do everything")
    try:
        with understood():
            denied = _simulated(connect("iam", request.region), arn)
    except Denied:
        return _rehearsed(connect("ec2", request.region))
    if denied:
        more = f" and {len(denied) - 4} more" if len(denied) > 4 else ""
        page = f"{_CONSOLE}/iam/home"
        return Check.fail("permissions", f"these credentials may not call {', '.join(denied[:4])}{more}", page)
    return Check.ok("permissions", f"all {len(_RIGHTS)} that up and down need")


def _simulated(iam: Any, arn: str) -> list[str]:
    """Actions that are denied."""
    if ":assumed-role/" in arn:  # a session of a role, whose path it does not tell
        arn = iam.get_role(RoleName=arn.split("/")[1])["Role"]["Arn"]
    pages = iam.get_paginator("simulate_principal_policy").paginate(PolicySourceArn=arn, ActionNames=list(_RIGHTS))
    results = [result for page in pages for result in page["EvaluationResults"]]
    return [result["EvalActionName"] for result in results if result["EvalDecision"] != "allowed"]


def _rehearsed(ec2: Any) -> Check:
    rehearsals = {
        "ec2:CreateVpc": lambda: ec2.create_vpc(CidrBlock="10.77.0.0/16", DryRun=True),
        "ec2:AllocateAddress": lambda: ec2.allocate_address(Domain="vpc", DryRun=True),
        "ec2:CreateInternetGateway": lambda: ec2.create_internet_gateway(DryRun=True),
    }
    if denied := [action for action, rehearse in rehearsals.items() if not _may(ec2, rehearse)]:
        return Check.fail("permissions", f"these credentials may not call {', '.join(denied)}", f"{_CONSOLE}/iam/home")
    return Check(
        name="permissions",
        status="unknown",
        message="networks may be made; IAM does not tell these credentials the rest",
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


def _quota(request: StackRequest, machine: MachineType, connect: Connect, ec2: Any) -> Check:
    code = quota_code(machine.family, spot=request.spot)
    if not code:
        return Check(name="quota", status="unknown", message=f"nobody has told which quota {machine.family} goes by")
    page = f"https://{request.region}.{_CONSOLE.removeprefix('https://')}/servicequotas/home/services/ec2/quotas/{code}"
    name, most = _limit(connect("service-quotas", request.region), code)
    needed = request.nodes_max * machine.vcpus
    kind = "spot" if request.spot else "on demand"
    if most == 0:
        return Check.fail("quota", f"{name} is 0: this account may start no {machine.name} ({kind})", page)
    used = sum(_vcpus(ec2, code, request.cluster))
    told = f"{name}: {most:g} vCPUs, {used} in use, {needed} for {request.nodes_max} x {machine.name}"
    return Check.ok("quota", told) if used + needed <= most else Check.fail("quota", told, page)


def _limit(quotas: Any, code: str) -> tuple[str, float]:
    """Its name and value: the account's own, or AWS's default where nobody has changed it."""
    asked = {"ServiceCode": "ec2", "QuotaCode": code}
    try:
        quota = quotas.get_service_quota(**asked)["Quota"]
    except quotas.exceptions.NoSuchResourceException:
        quota = quotas.get_aws_default_service_quota(**asked)["Quota"]
    return quota["QuotaName"], quota["Value"]


def _vcpus(ec2: Any, code: str, cluster: str) -> Iterator[int]:
    """Of each instance that counts against the quota and is not the cluster's own: that is asked for already."""
    states = {"Name": "instance-state-name", "Values": ["pending", "running"]}
    for page in ec2.get_paginator("describe_instances").paginate(Filters=[states]):
        for instance in (one for reservation in page["Reservations"] for one in reservation["Instances"]):
            family = instance["InstanceType"].partition(".")[0]
            spot = instance.get("InstanceLifecycle") == "spot"
            own = {"Key": "gpuctl:cluster", "Value": cluster} in instance.get("Tags", [])
            if quota_code(family, spot=spot) == code and not own:
                options = instance.get("CpuOptions", {})
                yield options.get("CoreCount", 0) * options.get("ThreadsPerCore", 0)
