"""Limits of a subscription that run out first, besides machines: public addresses, networks, resource groups."""

from __future__ import annotations

from typing import Literal

from gpuctl.stacks.clouds.answers import PreflightCheck
from gpuctl.stacks.clouds.azure import kept_resource_group, resource_group
from gpuctl.stacks.clouds.azure.client import PORTAL, AzureAccount
from gpuctl.stacks.clouds.azure.error_mapping import NotFound, understood
from gpuctl.stacks.request.stack_request import StackRequest

QUOTAS = f"{PORTAL}/#view/Microsoft_Azure_Capacity/QuotaMenuBlade/~/myQuotas"
_GROUPS = "2021-04-01"
_MOST_GROUPS = 980
"""learn.microsoft.com, "Azure subscription limits": resource groups per subscription. Nobody can raise it."""
_USAGES = {
    "addresses": ("StandardSkuPublicIpAddresses", "StandardPublicIPAddresses", "PublicIPAddresses"),
    "networks": ("VirtualNetworks",),
}
"""What Azure calls them among the usages of a region; of several the first that it tells."""


def network_limit(
    request: StackRequest, account: AzureAccount, what: Literal["addresses", "networks"]
) -> PreflightCheck:
    """One address a machine, one network a cluster. What the cluster has already is asked for already."""
    usages = {one.name.value.lower(): one for one in account.network.usages.list(request.region)}
    found = next((usages[name.lower()] for name in _USAGES[what] if name.lower() in usages), None)
    if found is None:
        return PreflightCheck(
            name=what, status="unknown", message=f"Azure reports no limit for {what} in {request.region}"
        )
    own = _own(request, account, what)
    needed = request.nodes_max if what == "addresses" else 1
    used = max(0, found.current_value - own)
    called = found.name.localized_value or found.name.value
    line = f"{called}: {found.limit}, {used} in use, {needed} needed"
    return PreflightCheck.fail(what, line, QUOTAS) if used + needed > found.limit else PreflightCheck.ok(what, line)


def group_limit(request: StackRequest, account: AzureAccount) -> PreflightCheck:
    """One for the cluster, one for its bucket unless one is given."""
    there = {one["name"].lower() for one in account.listed("resourcegroups", _GROUPS)}
    wanted = {resource_group(request), *(() if request.bucket else (kept_resource_group(request),))}
    new = len(wanted - there)
    line = f"resource groups: {_MOST_GROUPS}, {len(there)} in use, {new} needed"
    if len(there) + new > _MOST_GROUPS:
        return PreflightCheck.fail("groups", f"{line}; delete some")
    return PreflightCheck.ok("groups", line)


def _own(request: StackRequest, account: AzureAccount, what: str) -> int:
    where = resource_group(request), request.named(64)
    network = account.network
    try:
        with understood():
            if what == "networks":
                network.virtual_networks.get(*where)
                return 1
            addresses = network.public_ip_addresses.list_virtual_machine_scale_set_public_ip_addresses(*where)
            return sum(1 for _ in addresses)
    except NotFound:
        return 0
