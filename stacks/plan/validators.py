"""Rules that tell what is wrong with a request before anything is created, all at once. Each rule has a name and a
severity: an ``error`` stops ``up``, a ``warning`` is shown and asked about, a ``note`` is shown.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from gpuctl.stacks.catalog.instance_types import MachineType, Price, catalog
from gpuctl.stacks.catalog.offers import refreshing
from gpuctl.stacks.clouds.answers import PlanFinding, Severity
from gpuctl.stacks.clouds.interface import Cloud
from gpuctl.stacks.clouds.user_data import compressed
from gpuctl.stacks.request.stack_request import StackRequest
from gpuctl.stacks.ssh import keys

_RDMA = ("efa", "infiniband")
_OF_OLD_GPUS = "NVIDIA's closed driver, 580 or older, and a torch built for sm_70"
_PLACED_TOGETHER = 100
"""Machines that one placement group of a scale set holds: learn.microsoft.com, "large virtual machine scale sets"."""

_MACHINE_IMAGES = {
    "aws": (re.compile(r"ami-[0-9a-f]+"), "ami-0123456789abcdef0"),
    "gcp": (
        re.compile(r"(https://(www|compute)\.googleapis\.com/compute/(v1|beta)/)?projects/[^/]+/global/images/\S+"),
        "projects/PROJECT/global/images/family/FAMILY",
    ),
    "azure": (re.compile(r"[\w.-]+(:[\w.-]+){3}"), "microsoft-dsvm:ubuntu-hpc:2404:latest"),
}
"""What each cloud's program takes, and one such."""


@dataclass(frozen=True, slots=True)
class Draft:
    """The request and the resources that the rules look at."""

    request: StackRequest
    machine: MachineType
    price: Price | None
    cloud: Cloud

    @property
    def has_rdma(self) -> bool:
        return self.machine.fabric in _RDMA


@dataclass(frozen=True, slots=True)
class Rule:
    name: str
    severity: Severity
    check: Callable[[Draft], tuple[str, str] | None]
    """What is wrong, and what to do."""


def findings(draft: Draft) -> Sequence[PlanFinding]:
    """All rules' findings, the most serious first."""
    order = ("error", "warning", "note")
    return sorted(_findings(draft), key=lambda finding: order.index(finding.severity))


def _findings(draft: Draft) -> Iterator[PlanFinding]:
    for rule in RULES:
        if wrong := rule.check(draft):
            message, hint = wrong
            yield PlanFinding(rule=rule.name, severity=rule.severity, message=message, hint=hint)


def _gpu_too_old(draft: Draft) -> tuple[str, str] | None:
    if draft.machine.before_turing and not draft.request.image:
        return f"the {draft.machine.gpu} is too old for the driver and the PyTorch that gpuctl installs", (
            f"choose a T4 or newer, or add --image with {_OF_OLD_GPUS}"
        )
    return None


def _own_image_for_old_gpu(draft: Draft) -> tuple[str, str] | None:
    if draft.machine.before_turing and draft.request.image:
        return f"the {draft.machine.gpu} works only if --image brings {_OF_OLD_GPUS}", "else choose a T4 or newer"
    return None


def _own_image_for_nvlink_5(draft: Draft) -> tuple[str, str] | None:
    """Its switches want NVIDIA's subnet manager besides, which the clouds' images have: Fabric Manager user guide,
    "NVLink Subnet Manager"."""
    if draft.request.image and draft.machine.gpu.startswith("B200"):
        return f"{draft.machine.name} starts its GPUs only if --image brings nvidia-fabricmanager and nvlsm", (
            "leave --image out for the cloud's own"
        )
    return None


def _fabric_without_placement(draft: Draft) -> tuple[str, str] | None:
    if draft.has_rdma and draft.request.nodes_max > 1 and not draft.request.placement:
        return f"{draft.machine.name} has {draft.machine.fabric}, which is slow between machines far apart", (
            "remove --no-placement"
        )
    return None


def _several_zones_with_fabric(draft: Draft) -> tuple[str, str] | None:
    if draft.has_rdma and len(draft.request.zones) > 1:
        return f"{draft.machine.fabric} does not span zones, but there are {len(draft.request.zones)}", "choose one"
    return None


def _several_zones_for_one_group(draft: Draft) -> tuple[str, str] | None:
    request = draft.request
    if request.provider != "aws" and len(request.zones) > 1:
        return f"the machines must be in one zone, but there are {len(request.zones)}", "choose one"
    return None


def _too_many_together(draft: Draft) -> tuple[str, str] | None:
    request = draft.request
    if request.provider == "azure" and request.placement and request.nodes_max > _PLACED_TOGETHER:
        return f"Azure places up to {_PLACED_TOGETHER} machines together, and not {request.nodes_max}", (
            "take fewer, or add --no-placement"
        )
    return None


def _no_key(draft: Draft) -> tuple[str, str] | None:
    if draft.request.ssh_key:
        return None
    make = "make one with `ssh-keygen -t ed25519`, or give a public key with --ssh-key"
    if draft.request.provider == "azure":
        return "Azure needs an SSH key to create machines", make
    if draft.request.ssh_from:
        return (
            "no SSH key found, and none could be made: ~/.ssh has neither id_ed25519.pub nor id_rsa.pub that is usable",
            make,
        )
    return None


def _key_not_taken(draft: Draft) -> tuple[str, str] | None:
    return keys.refusal(draft.request.provider, draft.request.ssh_key) if draft.request.ssh_key else None


def _user_data_too_long(draft: Draft) -> tuple[str, str] | None:
    size, most = len(compressed(draft.request.user_data)), draft.cloud.user_data_bytes
    if size > most:
        return f"the machines' start-up data has {size} bytes, and {draft.request.provider} takes {most}", (
            "take a bucket with a shorter URL (--bucket): all else in it is gpuctl's own"
        )
    return None


def _not_sold_as_spot(draft: Draft) -> tuple[str, str] | None:
    if draft.request.spot and not draft.machine.spot:
        return f"{draft.machine.name} is not sold as spot", "add --on-demand"
    return None


def _unknown_price(draft: Draft) -> tuple[str, str] | None:
    request, machine = draft.request, draft.machine
    kind = "spot" if request.spot else "on-demand"
    if draft.price is None:
        sold = sorted({price.region for price in catalog().prices if price.type == machine.name})
        others = f"the catalog has it in {', '.join(sold[:3])}{' …' if len(sold) > 3 else ''}" if sold else ""
        return f"not known whether {request.region} has {machine.name}, or at what price", (
            f"{others}{'; ' if others else ''}gpuctl check asks the cloud"
        )
    if (draft.price.spot if request.spot else draft.price.on_demand) is None:
        how = f", or ask: {refreshing(machine, request.region)}" if request.spot else ""
        return f"{kind} price of {machine.name} in {request.region} not available", f"look it up{how}"
    return None


def _not_a_machine_image(draft: Draft) -> tuple[str, str] | None:
    shape, such_as = _MACHINE_IMAGES[draft.request.provider]
    if draft.request.image and not shape.fullmatch(draft.request.image):
        return f"--image {draft.request.image} is not a machine image of {draft.request.provider}", (
            f"for example {such_as}; a container image is for gpuctl train --image"
        )
    return None


def _slow_network(draft: Draft) -> tuple[str, str] | None:
    if draft.request.nodes_max > 1 and draft.machine.gpus >= 8 and not draft.has_rdma:
        gbps = draft.machine.network_gbps
        return f"{draft.machine.name} has no RDMA: {gbps:g} Gb/s for {draft.machine.gpus} GPUs, over TCP", (
            "methods such as DiLoCo or compressed gradients need less"
        )
    return None


def _nobody_may_enter(draft: Draft) -> tuple[str, str] | None:
    if not draft.request.ssh_from:
        return "no SSH access to the machines", "add --ssh-from me, or give a network"
    return None


RULES = (
    Rule("gpu-too-old", "error", _gpu_too_old),
    Rule("several-zones-with-fabric", "error", _several_zones_with_fabric),
    Rule("several-zones-for-one-group", "error", _several_zones_for_one_group),
    Rule("too-many-together", "error", _too_many_together),
    Rule("no-ssh-key", "error", _no_key),
    Rule("ssh-key-not-taken", "error", _key_not_taken),
    Rule("user-data-too-long", "error", _user_data_too_long),
    Rule("not-sold-as-spot", "error", _not_sold_as_spot),
    Rule("not-a-machine-image", "error", _not_a_machine_image),
    Rule("own-image-for-old-gpu", "warning", _own_image_for_old_gpu),
    Rule("own-image-for-nvlink-5", "warning", _own_image_for_nvlink_5),
    Rule("fabric-without-placement", "warning", _fabric_without_placement),
    Rule("unknown-price", "warning", _unknown_price),
    Rule("no-rdma", "note", _slow_network),
    Rule("no-ssh", "note", _nobody_may_enter),
)
