"""The limits of an account, and how much of each is in use: machines, and what a network is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from gpuctl.stacks.catalog.instance_types import MachineType
from gpuctl.stacks.clouds.answers import PreflightCheck
from gpuctl.stacks.clouds.aws import has_public_address
from gpuctl.stacks.clouds.aws.client import Connect
from gpuctl.stacks.clouds.aws.partition import console
from gpuctl.stacks.request.stack_request import StackRequest

_OWN = "gpuctl:cluster"


def quota_code(family: str, *, spot: bool) -> str:
    """The code of the quota, in vCPUs, that machines of a family such as ``p4d`` count against; empty if none is known.
    AWS's "Amazon EC2 service quotas": *Running On-Demand P instances* and its like."""
    if family.startswith(("g", "vt")):
        return "L-3819A6DF" if spot else "L-DB2E81BA"
    if family.startswith("p") and not spot:
        return "L-417A185B"
    if family.startswith("p5"):
        return "L-C4BD4855"
    return "L-7212CCBC" if family.startswith(("p2", "p3", "p4")) else ""


def quota(request: StackRequest, machine: MachineType, connect: Connect) -> PreflightCheck:
    """Check the quota of vCPUs."""
    ec2 = connect("ec2", request.region)
    code = quota_code(machine.family, spot=request.spot)
    if not code:
        return PreflightCheck(name="quota", status="unknown", message=f"the quota of {machine.family} is not known")
    page = _page(request, "ec2", code)
    name, most = _limit(connect("service-quotas", request.region), "ec2", code)
    needed = request.nodes_max * machine.vcpus
    kind = "spot" if request.spot else "on demand"
    if most == 0:
        return PreflightCheck.fail(
            "quota", f"{name} is 0: this account may not start any {machine.name} ({kind})", page
        )
    used = sum(_vcpus(ec2, code, request.cluster))
    told = f"{name}: {most:g} vCPUs, {used} in use, {needed} for {request.nodes_max} x {machine.name}"
    return PreflightCheck.ok("quota", told) if used + needed <= most else PreflightCheck.fail("quota", told, page)


def networks(request: StackRequest, machine: MachineType, connect: Connect) -> PreflightCheck:
    """Check the quotas of what the network is made of: five of each in a region by default, and usually the first to be
    used up."""
    quotas, ec2 = connect("service-quotas", request.region), connect("ec2", request.region)
    told = []
    for service, code, count in _limits(request, machine):
        name, most = _limit(quotas, service, code)
        used = sum(not _is_own(one, request.cluster) for one in count(ec2))
        if used + 1 > most:
            page = _page(request, service, code)
            return PreflightCheck.fail(
                "network limits", f"{name}: {most:g}, {used} in use, and this needs one more", page
            )
        told.append(f"{name}: {used} of {most:g}")
    return PreflightCheck.ok("network limits", "; ".join(told))


Count = Callable[[Any], list[dict[str, Any]]]
"""With a client of EC2: what is in use, with its tags."""


def _limits(request: StackRequest, machine: MachineType) -> Iterator[tuple[str, str, Count]]:
    """Service and code of each quota: docs.aws.amazon.com/vpc, "Amazon VPC quotas"."""
    yield "vpc", "L-F678F1CE", lambda ec2: _all(ec2, "describe_vpcs", "Vpcs")
    yield "vpc", "L-A4707A72", lambda ec2: _all(ec2, "describe_internet_gateways", "InternetGateways")
    if has_public_address(machine):
        return
    yield "ec2", "L-0263D0A3", lambda ec2: list(ec2.describe_addresses()["Addresses"])
    if request.zones:
        yield "vpc", "L-FE5A380F", lambda ec2: _gateways(ec2, request.zones[0])


def _all(ec2: Any, call: str, key: str) -> list[dict[str, Any]]:
    return [one for page in ec2.get_paginator(call).paginate() for one in page[key]]


def _gateways(ec2: Any, zone: str) -> list[dict[str, Any]]:
    """NAT gateways that count, which a zone has so many of."""
    zones = {one["SubnetId"]: one["AvailabilityZone"] for one in _all(ec2, "describe_subnets", "Subnets")}
    found = _all(ec2, "describe_nat_gateways", "NatGateways")
    live = [one for one in found if one["State"] in ("pending", "available", "deleting")]
    return [one for one in live if zones.get(one["SubnetId"]) == zone]


def _is_own(thing: dict[str, Any], cluster: str) -> bool:
    """Made already, as by an ``up`` before this one."""
    return {"Key": _OWN, "Value": cluster} in thing.get("Tags", [])


def _page(request: StackRequest, service: str, code: str) -> str:
    host = console(request.region).removeprefix("https://")
    return f"https://{request.region}.{host}/servicequotas/home/services/{service}/quotas/{code}"


def _limit(quotas: Any, service: str, code: str) -> tuple[str, float]:
    """Its name and value: the account's own, or AWS's default where nobody has changed it."""
    asked = {"ServiceCode": service, "QuotaCode": code}
    try:
        quota = quotas.get_service_quota(**asked)["Quota"]
    except quotas.exceptions.NoSuchResourceException:
        quota = quotas.get_aws_default_service_quota(**asked)["Quota"]
    return quota["QuotaName"], quota["Value"]


def _vcpus(ec2: Any, code: str, cluster: str) -> Iterator[int]:
    """The vCPUs of each instance that counts against the quota, without the cluster's own."""
    states = {"Name": "instance-state-name", "Values": ["pending", "running"]}
    for page in ec2.get_paginator("describe_instances").paginate(Filters=[states]):
        for instance in (one for reservation in page["Reservations"] for one in reservation["Instances"]):
            family = instance["InstanceType"].partition(".")[0]
            spot = instance.get("InstanceLifecycle") == "spot"
            if quota_code(family, spot=spot) == code and not _is_own(instance, cluster):
                options = instance.get("CpuOptions", {})
                yield options.get("CoreCount", 0) * options.get("ThreadsPerCore", 0)
