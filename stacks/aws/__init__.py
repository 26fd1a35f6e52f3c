"""Amazon Web Services: an auto scaling group of spot instances, in one subnet, with EFA where the type has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpuctl.stacks.cloud import Cloud, Extra
from gpuctl.stacks.machines import MachineType
from gpuctl.stacks.request import StackRequest

NAT_USD_PER_HOUR = 0.045
"""us-east-1, and 0.045 for each GB besides; not looked up: see aws.amazon.com/vpc/pricing. S3 goes past it."""
PUBLIC_ADDRESS_USD_PER_HOUR = 0.005


class Aws(Cloud):
    name = "aws"
    user_data_bytes = 16_384
    first_zone = "{}a"

    def program(self, request: StackRequest, machine: MachineType) -> Mapping[str, object]:
        import pulumi
        import pulumi_aws as aws

        from gpuctl.stacks.aws.group import Group
        from gpuctl.stacks.aws.identity import Identity
        from gpuctl.stacks.aws.network import Network
        from gpuctl.stacks.aws.storage import Storage

        # Not the default one, which would go by the environment: the wrong region, or another account, is an error.
        provider = aws.Provider(
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
        if has_public_address(machine):
            return [Extra("public addresses", PUBLIC_ADDRESS_USD_PER_HOUR * request.nodes_max)]
        return [
            Extra("NAT gateway, and $0.045 for each GB through it", NAT_USD_PER_HOUR),
            Extra("public address of the NAT gateway", PUBLIC_ADDRESS_USD_PER_HOUR),
        ]

    def price_history(self, kind: str, zone: str, since: float, until: float) -> Sequence[tuple[float, float]]:
        """AWS remembers 90 days."""
        from gpuctl.stacks.aws.offers import price_history

        return price_history(kind, zone, since, until)


def has_public_address(machine: MachineType) -> bool:
    """Machines with several network cards can be given none when they start (Karpenter #5666)."""
    return machine.fabric_cards <= 1


CLOUD = Aws()
