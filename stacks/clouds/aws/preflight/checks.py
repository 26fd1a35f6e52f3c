"""Checks that an account would get what a request wants: credentials, region, machines in the zone, image, disks,
rights, limits.

Nothing is created. Capacity at this moment is not told: AWS knows it only when it starts a machine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpuctl.cluster.errors import BadInput, GpuctlError
from gpuctl.stacks.catalog.instance_types import MachineType
from gpuctl.stacks.clouds.answers import CredentialsRefused, PreflightCheck
from gpuctl.stacks.clouds.aws import client
from gpuctl.stacks.clouds.aws.client import Connect, connecting, understood, unknown_region, who
from gpuctl.stacks.clouds.aws.partition import console, home
from gpuctl.stacks.clouds.aws.preflight.limits import networks, quota
from gpuctl.stacks.clouds.aws.preflight.permissions import permissions
from gpuctl.stacks.request.stack_request import StackRequest

_KEYS_OF_DISKS = "https://docs.aws.amazon.com/autoscaling/ec2/userguide/key-policy-requirements-EBS-encryption.html"


def checks(request: StackRequest, machine: MachineType, connect: Connect | None = None) -> list[PreflightCheck]:
    """All at once, but for credentials and the region: without them nothing else can be asked. Raises ``BadInput`` if
    boto3 is not installed."""
    page = console(request.region)
    try:
        connect = connect or connecting()
        caller = who(connect, home(request.region))
    except BadInput:
        raise
    except CredentialsRefused as error:
        return [PreflightCheck.fail("credentials", str(error), f"{page}/iam/home#/security_credentials")]
    except GpuctlError as error:
        return [PreflightCheck.fail("region", str(error), f"{page}/billing/home#/account")]
    credentials, region = _credentials(request, caller), PreflightCheck.of("region", lambda: _region(request, connect))
    if region.status == "fail":
        return [credentials, region]
    ec2 = connect("ec2", request.region)
    found = [
        credentials,
        region,
        PreflightCheck.of("machines", understood()(lambda: _machines(request, ec2))),
        _if_told("disks", lambda: _disks(ec2)),
        PreflightCheck.of("permissions", understood()(lambda: permissions(connect, request, machine, caller))),
        PreflightCheck.of("quota", understood()(lambda: quota(request, machine, connect))),
        _if_told("network limits", lambda: networks(request, machine, connect)),
    ]
    if request.image:
        found.insert(3, PreflightCheck.of("image", understood()(lambda: _image(request, ec2))))
    return found


def _if_told(name: str, ask: Callable[[], PreflightCheck]) -> PreflightCheck:
    """The check that ``ask`` returns. That it cannot be asked, for whatever reason, should stop nobody."""
    try:
        with understood():
            return ask()
    except GpuctlError as error:
        return PreflightCheck(name=name, status="unknown", message=str(error))


def _credentials(request: StackRequest, caller: dict[str, str]) -> PreflightCheck:
    if request.account and request.account != caller["Account"]:
        return PreflightCheck.fail(
            "credentials", f"they belong to account {caller['Account']}, not to {request.account}"
        )
    return PreflightCheck.ok("credentials", f"account {caller['Account']}, {caller['Arn']}")


def _region(request: StackRequest, connect: Connect) -> PreflightCheck:
    regions = client.regions(connect, request.region)
    if request.region not in regions:
        raise unknown_region(request.region, regions)
    if not regions[request.region]:
        page = f"{console(request.region)}/billing/home#/account"
        return PreflightCheck.fail("region", f"{request.region} is not enabled for this account", page)
    return PreflightCheck.ok("region", request.region)


def _image(request: StackRequest, ec2: Any) -> PreflightCheck:
    found = ec2.describe_images(ImageIds=[request.image])["Images"]
    if not found:
        return PreflightCheck.fail("image", f"there is no image {request.image} in {request.region}")
    (image,) = found
    if image.get("State", "available") != "available" or image.get("Architecture", "x86_64") != "x86_64":
        told = f"{request.image} is {image.get('State')}, {image.get('Architecture')}; it must be available and x86_64"
        return PreflightCheck.fail("image", told)
    return PreflightCheck.ok("image", f"{request.image}, {image.get('Name', 'without a name')}")


def _disks(ec2: Any) -> PreflightCheck:
    """Machines are started by Auto Scaling's own role: a key of the account's own must let that role use it."""
    key = ec2.get_ebs_default_kms_key_id()["KmsKeyId"]
    if key.endswith("alias/aws/ebs"):
        return PreflightCheck.ok("disks", "encrypted with AWS's own key")
    told = f"encrypted with {key}: its policy must let AWSServiceRoleForAutoScaling use it, or no machine will start"
    return PreflightCheck(name="disks", status="unknown", message=told, page=_KEYS_OF_DISKS)


def _machines(request: StackRequest, ec2: Any) -> PreflightCheck:
    pages = ec2.get_paginator("describe_instance_type_offerings").paginate(
        LocationType="availability-zone", Filters=[{"Name": "instance-type", "Values": [request.type]}]
    )
    zones = sorted({offer["Location"] for page in pages for offer in page["InstanceTypeOfferings"]})
    if not zones:
        return PreflightCheck.fail(
            "machines", f"there is no {request.type} in {request.region}; use another --region or --type"
        )
    if missing := [zone for zone in request.zones if zone not in zones]:
        return PreflightCheck.fail(
            "machines", f"there is no {request.type} in {', '.join(missing)}; --zone {' or '.join(zones)} has it"
        )
    return PreflightCheck.ok("machines", f"{request.type} is sold in {', '.join(request.zones or zones)}")
