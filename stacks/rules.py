"""What is wrong with a request before anything is created, all at once. Each rule has a name and a severity: an
``error`` stops ``up``, a ``warning`` is shown and asked about, a ``note`` is shown.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from gpuctl.stacks.cloud import Cloud, Finding, Severity
from gpuctl.stacks.machines import MachineType, Price
from gpuctl.stacks.request import StackRequest

_RDMA = ("efa", "infiniband")
_OF_OLD_GPUS = "NVIDIA's closed driver, 580 or older, and a torch built for sm_70"
_PLACED_TOGETHER = 100
"""Machines that one placement group of a scale set holds: learn.microsoft.com, "large virtual machine scale sets"."""


@dataclass(frozen=True, slots=True)
class Draft:
    """What the rules look at."""

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


def findings(draft: Draft) -> Sequence[Finding]:
    """The gravest first."""
    order = ("error", "warning", "note")
    return sorted(_findings(draft), key=lambda finding: order.index(finding.severity))


def compressed(user_data: str) -> bytes:
    """As cloud-init is given it: it knows gzip, and a typical one shrinks to a third. The same bytes for the same
    text."""
    return gzip.compress(user_data.encode(), mtime=0)


def _findings(draft: Draft) -> Iterator[Finding]:
    for rule in RULES:
        if wrong := rule.check(draft):
            message, hint = wrong
            yield Finding(rule=rule.name, severity=rule.severity, message=message, hint=hint)


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


def _fabric_without_placement(draft: Draft) -> tuple[str, str] | None:
    if draft.has_rdma and draft.request.nodes_max > 1 and not draft.request.placement:
        return f"{draft.machine.name} has {draft.machine.fabric}, which is slow between machines far apart", (
            "leave --no-placement out"
        )
    return None


def _several_zones_with_fabric(draft: Draft) -> tuple[str, str] | None:
    if draft.has_rdma and len(draft.request.zones) > 1:
        return f"{draft.machine.fabric} does not cross zones, and there are {len(draft.request.zones)}", "choose one"
    return None


def _several_zones_for_one_group(draft: Draft) -> tuple[str, str] | None:
    request = draft.request
    if request.provider != "aws" and len(request.zones) > 1:
        return f"the group of machines is in one zone, and there are {len(request.zones)}", "choose one"
    return None


def _too_many_together(draft: Draft) -> tuple[str, str] | None:
    request = draft.request
    if request.provider == "azure" and request.placement and request.nodes_max > _PLACED_TOGETHER:
        return f"Azure places up to {_PLACED_TOGETHER} machines together, and not {request.nodes_max}", (
            "take fewer, or add --no-placement"
        )
    return None


def _no_key(draft: Draft) -> tuple[str, str] | None:
    if draft.request.provider == "azure" and not draft.request.ssh_key:
        return "Azure makes no machine without a key to log in with", "--ssh-key names a public key"
    return None


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
    kind = "spot" if draft.request.spot else "on-demand"
    price = draft.price and (draft.price.spot if draft.request.spot else draft.price.on_demand)
    if price is None:
        return f"nobody has told the {kind} price of {draft.machine.name} in {draft.request.region}", (
            "look it up before you say yes"
        )
    return None


def _slow_network(draft: Draft) -> tuple[str, str] | None:
    if draft.request.nodes_max > 1 and draft.machine.gpus >= 8 and not draft.has_rdma:
        gbps = draft.machine.network_gbps
        return f"{draft.machine.name} has no RDMA: {gbps:g} Gb/s for {draft.machine.gpus} GPUs, over TCP", (
            "such as DiLoCo or compressed gradients get by with less"
        )
    return None


def _nobody_may_enter(draft: Draft) -> tuple[str, str] | None:
    if not draft.request.ssh_from:
        return "nobody may log in to the machines", "--ssh-from me lets you; or name a network"
    return None


RULES = (
    Rule("gpu-too-old", "error", _gpu_too_old),
    Rule("several-zones-with-fabric", "error", _several_zones_with_fabric),
    Rule("several-zones-for-one-group", "error", _several_zones_for_one_group),
    Rule("too-many-together", "error", _too_many_together),
    Rule("no-ssh-key", "error", _no_key),
    Rule("user-data-too-long", "error", _user_data_too_long),
    Rule("not-sold-as-spot", "error", _not_sold_as_spot),
    Rule("own-image-for-old-gpu", "warning", _own_image_for_old_gpu),
    Rule("fabric-without-placement", "warning", _fabric_without_placement),
    Rule("unknown-price", "warning", _unknown_price),
    Rule("no-rdma", "note", _slow_network),
    Rule("no-ssh", "note", _nobody_may_enter),
)
