"""Amazon Web Services: an auto scaling group of spot instances, in one subnet, with EFA where the type has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpuctl.bootstrap.node_spec import AGENT_STOP_S
from gpuctl.stacks.catalog.instance_types import MachineType
from gpuctl.stacks.clouds.answers import Leftover
from gpuctl.stacks.clouds.interface import HOURS_A_MONTH, Cloud, Extra
from gpuctl.stacks.request.stack_request import StackRequest

NAT_USD_PER_HOUR = 0.045
"""us-east-1, and 0.045 for each GB besides; not looked up: see aws.amazon.com/vpc/pricing. S3 goes past it."""
PUBLIC_ADDRESS_USD_PER_HOUR = 0.005
VOLUME_USD_PER_GB_MONTH = {"gp3": 0.08, "gp2": 0.10, "io1": 0.125, "io2": 0.125, "st1": 0.045, "sc1": 0.015}
"""us-east-1; not looked up: see aws.amazon.com/ebs/pricing. Machines have gp3."""
THROUGHPUT_USD_PER_MONTH = 0.04 * 375
"""Of a fast disk (``group.FAST_DISK_MB_PER_S``), beyond the 125 MB/s of every gp3."""


class Aws(Cloud):
    name = "aws"
    user_data_bytes = 16_384
    first_zone = "{}a"

    def program(self, request: StackRequest, machine: MachineType) -> Mapping[str, object]:
        import pulumi
        from pulumi_aws.provider import Provider

        from gpuctl.stacks.clouds.aws.resources.group import Group
        from gpuctl.stacks.clouds.aws.resources.identity import Identity
        from gpuctl.stacks.clouds.aws.resources.network import Network
        from gpuctl.stacks.clouds.aws.resources.storage import Storage

        # Not the default one, which would go by the environment: the wrong region, or another account, is an error.
        provider = Provider(
            request.cluster,
            region=request.region,
            allowed_account_ids=[request.account] if request.account else None,
        )
        there = pulumi.ResourceOptions(providers=[provider])
        network = Network(request, machine, there)
        storage = Storage(request, there)
        identity = Identity(request, storage, there)
        group = Group(request, machine, network, identity, there)
        return {
            "bucket": storage.url,
            "group": group.group.name,
            "region": request.region,
            "zones": list(request.zones),
            "account": request.account,
        }

    def extras(self, request: StackRequest, machine: MachineType) -> Sequence[Extra]:
        faster = THROUGHPUT_USD_PER_MONTH if machine.takes_fast_disk else 0
        month = VOLUME_USD_PER_GB_MONTH["gp3"] * request.disk_gb + faster
        disks = Extra("disks", month / HOURS_A_MONTH * request.nodes_max)
        if has_public_address(machine):
            return [disks, Extra("public addresses", PUBLIC_ADDRESS_USD_PER_HOUR * request.nodes_max)]
        return [
            disks,
            Extra("NAT gateway, and $0.045 for each GB through it", NAT_USD_PER_HOUR),
            Extra("public address of the NAT gateway", PUBLIC_ADDRESS_USD_PER_HOUR),
        ]

    def shutdown_s(self, request: StackRequest) -> float:
        """AWS waits for minutes ("Troubleshoot EC2 instance termination": shutdown scripts may delay it) and does not
        bill them. A spot machine is taken 120 s after a notice that the agent reads itself."""
        del request
        return AGENT_STOP_S

    def parts(self, leftovers: Sequence[Leftover]) -> Sequence[Leftover]:
        """The rules of security groups; see ``Cloud``."""
        from gpuctl.stacks.clouds.aws.cleanup.leaks import rules

        return rules(leftovers)

    def price_history(self, kind: str, zone: str, since: float, until: float) -> Sequence[tuple[float, float]]:
        """The spot prices of a type over time; see ``Cloud``. AWS keeps 90 days.

        Args:
            kind: instance type.
            zone: availability zone, such as ``us-east-1a``.
            since: beginning of the time asked about, in seconds since the epoch.
            until: its end, in seconds since the epoch.
        """
        from gpuctl.stacks.clouds.aws.spot_prices import price_history

        return price_history(kind, zone, since, until)


def has_public_address(machine: MachineType) -> bool:
    """Machines with several network cards can be given none when they start (Karpenter #5666)."""
    return machine.fabric_cards <= 1


CLOUD = Aws()
