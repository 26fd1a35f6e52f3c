"""Amazon Web Services: an auto scaling group of spot instances, in one subnet, with EFA where the type has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpuctl.stacks.cloud import Check, Extra, GroupSize, Scan
from gpuctl.stacks.machines import MachineType, Price
from gpuctl.stacks.request import StackRequest

NAT_USD_PER_HOUR = 0.045
"""us-east-1, and 0.045 for each GB besides; not looked up: see aws.amazon.com/vpc/pricing. S3 goes past it."""
PUBLIC_ADDRESS_USD_PER_HOUR = 0.005


class Aws:
    """See ``cloud.Cloud``."""

    user_data_bytes = 16_384

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

    def account(self, region: str) -> str:
        """See ``cloud.Cloud``."""
        from gpuctl.stacks.aws.account import connecting, who

        return who(connecting(), region)["Account"]

    def size(self, outputs: Mapping[str, object]) -> GroupSize:
        """See ``cloud.Cloud``."""
        from gpuctl.stacks.aws.size import size

        return size(outputs)

    def resize(self, outputs: Mapping[str, object], nodes: int) -> None:
        """See ``cloud.Cloud``."""
        from gpuctl.stacks.aws.size import resize

        resize(outputs, nodes)

    def problems(self, outputs: Mapping[str, object]) -> Sequence[str]:
        """See ``cloud.Cloud``."""
        from gpuctl.stacks.aws.size import problems

        return problems(outputs)

    def zones(self, request: StackRequest) -> Sequence[str]:
        """See ``cloud.OrdersZones``."""
        from gpuctl.stacks.aws.zones import zones

        return zones(request)

    def leftovers(self, regions: Sequence[str], cluster: str | None) -> Scan:
        """See ``cloud.Cloud``."""
        from gpuctl.stacks.aws.leaks import scan

        return scan(regions, cluster)

    def checks(self, request: StackRequest, machine: MachineType) -> Sequence[Check]:
        """See ``cloud.Cloud``."""
        from gpuctl.stacks.aws.checks import checks

        return checks(request, machine)

    def spot_prices(self, regions: Sequence[str]) -> Sequence[Price]:
        """See ``cloud.Cloud``."""
        from gpuctl.stacks.aws.offers import spot_prices

        return spot_prices(regions)

    def price_history(self, kind: str, zone: str, since: float, until: float) -> Sequence[tuple[float, float]]:
        """See ``cloud.TellsPriceHistory``."""
        from gpuctl.stacks.aws.offers import price_history

        return price_history(kind, zone, since, until)


def has_public_address(machine: MachineType) -> bool:
    """Machines with several network cards can be given none when they start (Karpenter #5666)."""
    return machine.fabric_cards <= 1


CLOUD = Aws()
