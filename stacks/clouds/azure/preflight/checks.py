"""Checks that a subscription would get what a request wants: what Azure tells before anything is created.

Machines of a size count against two quotas. On demand these are the size's family's, whose name is on the list of
sizes, and the region's; spot has one for all families.
"""

from __future__ import annotations

from functools import cache, partial

from gpuctl.cluster.errors import BadInput, GpuctlError
from gpuctl.stacks.catalog.instance_types import MachineType
from gpuctl.stacks.clouds.answers import CredentialsRefused, PreflightCheck
from gpuctl.stacks.clouds.azure import resource_group
from gpuctl.stacks.clouds.azure.client import PORTAL, Answer, AzureAccount, connecting, who
from gpuctl.stacks.clouds.azure.error_mapping import NotFound, understood
from gpuctl.stacks.clouds.azure.preflight.limits import QUOTAS as _QUOTAS
from gpuctl.stacks.clouds.azure.preflight.limits import group_limit, network_limit
from gpuctl.stacks.clouds.azure.preflight.permissions import may, rights
from gpuctl.stacks.clouds.azure.regions import regions_of, unknown_region
from gpuctl.stacks.request.stack_request import StackRequest

_PROVIDERS = "2021-04-01"
_SPOT_QUOTA, _REGION_QUOTA = "lowPriorityCores", "cores"
_PARTS = ("Microsoft.Compute", "Microsoft.Network", "Microsoft.Storage", "Microsoft.ManagedIdentity")
"""Of Azure, that a subscription must have been registered for once."""
_RIGHTS = (
    *(
        "Microsoft.Resources/subscriptions/resourceGroups/write",
        "Microsoft.Resources/subscriptions/resourceGroups/delete",
    ),
    *("Microsoft.Compute/virtualMachineScaleSets/write", "Microsoft.Compute/virtualMachineScaleSets/delete"),
    *("Microsoft.Network/virtualNetworks/write", "Microsoft.Network/virtualNetworks/subnets/write"),
    *("Microsoft.Network/virtualNetworks/subnets/join/action", "Microsoft.Network/networkSecurityGroups/write"),
    "Microsoft.Network/networkSecurityGroups/join/action",
    "Microsoft.ManagedIdentity/userAssignedIdentities/write",
    "Microsoft.ManagedIdentity/userAssignedIdentities/assign/action",
    *("Microsoft.Authorization/roleAssignments/write", "Microsoft.Authorization/roleAssignments/delete"),
    *("Microsoft.Authorization/roleDefinitions/write", "Microsoft.Authorization/roleDefinitions/delete"),
)
"""What ``up`` and ``down`` call (see ``network``, ``identity``, ``group``), without what goes with it."""
_BUCKET_RIGHTS = (
    "Microsoft.Storage/storageAccounts/write",
    "Microsoft.Storage/storageAccounts/blobServices/containers/write",
)
"""For a cluster that is given no bucket."""
_SUBSCRIPTIONS = f"{PORTAL}/#view/Microsoft_Azure_Billing/SubscriptionsBladeV2"
_SUPPORT = f"{PORTAL}/#view/Microsoft_Azure_Support/NewSupportRequestV3Blade"


def checks(request: StackRequest, machine: MachineType, account: AzureAccount | None = None) -> list[PreflightCheck]:
    """All at once, but for credentials and subscription: without them nothing else can be asked."""
    try:
        account = account or connecting(request.account)
        _ = account.compute, account.network  # a package that is missing is no failed check
        there = who(account)
    except BadInput:
        raise
    except CredentialsRefused as error:
        return [
            PreflightCheck.fail(
                "credentials", str(error), "https://aka.ms/azsdk/python/identity/defaultazurecredential/troubleshoot"
            )
        ]
    except GpuctlError as error:
        return [PreflightCheck.fail("account", str(error), _SUBSCRIPTIONS)]
    if (region := PreflightCheck.of("region", lambda: _region(request, account))).status == "fail":
        return [_subscription(there), region]  # all else is asked of the region
    sold = cache(partial(_sold, request, account))  # a long list, which two of the checks want
    at = f"{PORTAL}/#@/resource/subscriptions/{account.subscription}"
    return [
        PreflightCheck.ok("credentials", f"of tenant {there.get('tenantId', 'unknown')}"),
        _subscription(there),
        region,
        PreflightCheck.of("machines", understood()(lambda: _machines(request, sold()))),
        PreflightCheck.of("providers", understood()(lambda: _providers(account, f"{at}/resourceproviders"))),
        PreflightCheck.of("permissions", understood()(lambda: _permissions(request, account, f"{at}/users"))),
        PreflightCheck.of("addresses", understood()(lambda: network_limit(request, account, "addresses"))),
        PreflightCheck.of("networks", understood()(lambda: network_limit(request, account, "networks"))),
        PreflightCheck.of("groups", understood()(lambda: group_limit(request, account))),
        PreflightCheck.of("quota", understood()(lambda: _quota(request, machine, account, sold()))),
    ]


def _subscription(there: Answer) -> PreflightCheck:
    told = f"{there.get('displayName', '')} ({there['subscriptionId']})".strip()
    if there.get("state") != "Enabled":
        return PreflightCheck.fail(
            "account", f"subscription {told} is {str(there.get('state')).lower()}", _SUBSCRIPTIONS
        )
    return PreflightCheck.ok("account", f"subscription {told}")


def _region(request: StackRequest, account: AzureAccount) -> PreflightCheck:
    error = unknown_region(request.region, regions_of(account))
    return PreflightCheck.fail("region", str(error)) if error else PreflightCheck.ok("region", request.region)


def _providers(account: AzureAccount, page: str) -> PreflightCheck:
    states = {one["namespace"]: one.get("registrationState") for one in account.listed("providers", _PROVIDERS)}
    missing = [part for part in _PARTS if states.get(part) != "Registered"]
    if not missing:
        return PreflightCheck.ok("providers", f"{', '.join(_PARTS)} are registered")
    how = " && ".join(f"az provider register --namespace {part}" for part in missing)
    return PreflightCheck.fail("providers", f"the subscription is not registered for {', '.join(missing)}; {how}", page)


def _permissions(request: StackRequest, account: AzureAccount, page: str) -> PreflightCheck:
    wanted = _RIGHTS if request.bucket else _RIGHTS + _BUCKET_RIGHTS
    given = rights(account)
    denied = [action for action in wanted if not may(action, given)]
    if denied:  # some are given the rights to one group only
        of_group = rights(account, resource_group(request))
        denied = [action for action in denied if not may(action, of_group)]
    if denied:
        more = f" and {len(denied) - 4} more" if len(denied) > 4 else ""
        return PreflightCheck.fail("permissions", f"these credentials may not call {', '.join(denied[:4])}{more}", page)
    return PreflightCheck.ok("permissions", f"all {len(wanted)} that up and down need")


# -- machines ---------------------------------------------------------------------------------------------------------


def _sold(request: StackRequest, account: AzureAccount) -> Answer | None:
    """The size as the region sells it, with what this subscription may not have."""
    for sku in account.compute.resource_skus.list(filter=f"location eq '{request.region}'"):
        if sku.name == request.type:
            found: Answer = sku.as_dict()
            return found
    return None


def _machines(request: StackRequest, sku: Answer | None) -> PreflightCheck:
    if sku is None:
        return PreflightCheck.fail(
            "machines", f"there is no {request.type} in {request.region}; use another --region or --type"
        )
    closed = {one["type"]: one.get("restrictionInfo") or {} for one in sku.get("restrictions") or ()}
    if "Location" in closed:
        return PreflightCheck.fail(
            "machines", f"this subscription may not use {request.type} in {request.region}", _SUPPORT
        )
    zones = sorted({zone for place in sku.get("locationInfo") or () for zone in place.get("zones") or ()})
    if missing := [zone for zone in request.zones if zone not in zones]:
        told = f"--zone {' or '.join(zones)} has it" if zones else "leave --zone out"
        return PreflightCheck.fail(
            "machines", f"there is no {request.type} in zone {', '.join(missing)} of {request.region}; {told}"
        )
    if shut := sorted(set(request.zones) & set(closed.get("Zone", {}).get("zones") or ())):
        told = f"this subscription may not use {request.type} in zone {', '.join(shut)} of {request.region}"
        return PreflightCheck.fail("machines", f"{told}; leave --zone out", _SUPPORT)
    if request.spot and _capability(sku, "LowPriorityCapable") == "False":
        return PreflightCheck.fail("machines", f"{request.type} is not sold as spot; add --on-demand")
    return PreflightCheck.ok("machines", f"{request.type} is sold in {', '.join(request.zones) or request.region}")


def _capability(sku: Answer, name: str) -> str:
    return next((one["value"] for one in sku.get("capabilities") or () if one["name"] == name), "")


# -- quota ------------------------------------------------------------------------------------------------------------


def _quota(request: StackRequest, machine: MachineType, account: AzureAccount, sku: Answer | None) -> PreflightCheck:
    usages = {one.name.value: one.as_dict() for one in account.compute.usage.list(request.region)}
    family = (sku or {}).get("family", "")
    names = [_SPOT_QUOTA] if request.spot else [family, _REGION_QUOTA]
    if unknown := [name for name in names if name not in usages]:
        told = f"Azure reports no quota {unknown[0]!r} in {request.region}" if unknown[0] else "the size has no family"
        return PreflightCheck(name="quota", status="unknown", message=told, page=_QUOTAS)
    own = _own_vcpus(request, machine, account)
    needed = request.nodes_max * machine.vcpus
    kind = "spot" if request.spot else "on demand"
    lines = []
    for usage in (usages[name] for name in names):
        called, most, used = usage["name"]["localizedValue"], usage["limit"], max(0, usage["currentValue"] - own)
        if most == 0:
            none = f"{called} is 0: this subscription may not start any {machine.name} ({kind})"
            return PreflightCheck.fail("quota", none, _QUOTAS)
        line = f"{called}: {most} vCPUs, {used} in use, {needed} for {request.nodes_max} x {machine.name}"
        if used + needed > most:
            return PreflightCheck.fail("quota", line, _QUOTAS)
        lines.append(line)
    return PreflightCheck.ok("quota", lines[0])


def _own_vcpus(request: StackRequest, machine: MachineType, account: AzureAccount) -> int:
    """Number of vCPUs in use by the cluster itself. Machines of another kind will be replaced, later."""
    where = resource_group(request), request.named(64)
    compute = account.compute
    try:
        with understood():
            scale_set = compute.virtual_machine_scale_sets.get(*where).as_dict()
            profile = scale_set["properties"].get("virtualMachineProfile") or {}
            if scale_set["sku"]["name"] != machine.name or (profile.get("priority") == "Spot") != request.spot:
                return 0
            return sum(machine.vcpus for _ in compute.virtual_machine_scale_set_vms.list(*where))
    except NotFound:
        return 0
