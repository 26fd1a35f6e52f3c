"""Google Cloud: a zonal managed instance group of Spot VMs, placed together where the family knows how.

There is no RDMA here. A2 has none at all: NCCL goes over TCP, at up to 100 Gb/s, through Google's virtual network card
(gVNIC). ``a3-highgpu-8g`` has four more cards for GPUDirect-TCPX, which wants networks and a plug-in of its own and is
not set up: its GPUs share the first card.

What Google hangs on a general machine is part of a type's name here: ``n1-standard-8+t4x1`` is ``n1-standard-8`` with
one T4. All other families bring their GPUs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from gpuctl.stacks.catalog.instance_types import MachineType
from gpuctl.stacks.clouds.interface import HOURS_A_MONTH, Cloud, Extra
from gpuctl.stacks.request.stack_request import StackRequest

if TYPE_CHECKING:
    import pulumi

PUBLIC_ADDRESS_USD_PER_HOUR = 0.005
PUBLIC_ADDRESS_OF_SPOT_USD_PER_HOUR = 0.0025
"""In use by a machine; not looked up: see cloud.google.com/vpc/network-pricing."""

DISK_USD_PER_GB_MONTH = {"pd-standard": 0.04, "pd-balanced": 0.10, "pd-ssd": 0.17}
"""us-central1; not looked up: see cloud.google.com/compute/disks-image-pricing. Which one machines have: ``disk_type``.
"""

NOTICE_S = 120
"""Of a preemption, as the machines ask for it: the longest there is; 30 without asking."""


SHUTDOWN_S = 85.0
"""Of the 90 that a machine on demand has ("Shutdown process" of Compute Engine); a Spot VM has 30."""


class Gcp(Cloud):
    name = "gcp"
    user_data_bytes = 256 * 1024 * 3 // 4
    """A value of the metadata is text of up to 256 KB, so it is sent in base64."""
    notice_s = NOTICE_S
    first_zone = "{}-b"
    """Some regions, such as us-east1, have no a."""

    def program(self, request: StackRequest, machine: MachineType) -> Mapping[str, object]:
        import pulumi
        from pulumi_gcp.provider import Provider

        from gpuctl.stacks.clouds.gcp.resources.group import Group
        from gpuctl.stacks.clouds.gcp.resources.identity import Identity
        from gpuctl.stacks.clouds.gcp.resources.network import Network
        from gpuctl.stacks.clouds.gcp.resources.storage import Storage

        # Not the default one, which would go by the environment.
        provider = Provider(
            request.cluster, project=request.account or None, region=request.region, zone=request.zones[0]
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

    def shutdown_s(self, request: StackRequest) -> float:
        return super().shutdown_s(request) if request.spot else SHUTDOWN_S

    def extras(self, request: StackRequest, machine: MachineType) -> Sequence[Extra]:
        each = PUBLIC_ADDRESS_OF_SPOT_USD_PER_HOUR if request.spot else PUBLIC_ADDRESS_USD_PER_HOUR
        disk = DISK_USD_PER_GB_MONTH[disk_type(machine)] / HOURS_A_MONTH * request.disk_gb
        return [
            Extra("disks", disk * request.nodes_max),
            Extra("public addresses", each * request.nodes_max),
        ]


_PLACED = ("a2-highgpu", "a2-ultragpu", "a3-highgpu", "g2")
"""cloud.google.com/compute/docs/instances/placement-policies-overview, on compact placement policies."""


def is_placed(request: StackRequest, machine: MachineType) -> bool:
    """Whether the machines stand close together, by a policy that is made for them."""
    return request.placement and machine.family in _PLACED


def disk_type(machine: MachineType) -> str:
    """Of the root disk. With 200 GB, pd-ssd moves 336 MB/s and pd-balanced 196: cloud.google.com/compute/docs/disks,
    "Performance limits"."""
    return "pd-ssd" if machine.takes_fast_disk else "pd-balanced"


def shape(machine: MachineType) -> tuple[str, tuple[str, int] | None]:
    """Google's own machine type, and the accelerator to hang on it with the number of them, where it brings none."""
    name, _, hung_on = machine.name.partition("+")
    if not hung_on:
        return name, None
    kind, _, count = hung_on.partition("x")
    return name, (f"nvidia-tesla-{kind}", int(count))


def labels(request: StackRequest) -> dict[str, str]:
    """The tags as Google takes them: a-z, 0-9, _ and - only, 63 characters, a letter first in the key."""
    return {
        key.replace(":", "-"): re.sub(r"[^a-z0-9_-]", "_", value.lower())[:63] for key, value in request.tags().items()
    }


def project(request: StackRequest, parent: pulumi.Resource) -> pulumi.Input[str]:
    """The one asked for, else the one that the user's credentials belong to."""
    if request.account:
        return request.account
    import pulumi
    from pulumi_gcp import organizations

    return organizations.get_client_config_output(opts=pulumi.InvokeOutputOptions(parent=parent)).project


CLOUD = Gcp()
