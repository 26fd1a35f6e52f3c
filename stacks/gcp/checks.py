"""Whether a project would get what a request wants: credentials, project, services, region, machines in the zone,
rights, quota.

Nothing is created. Capacity at this moment is not told: Google knows it only when it starts a machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gpuctl.cluster.errors import GpuctlError
from gpuctl.stacks.cloud import Check, CredentialsRefused, Denied
from gpuctl.stacks.gcp.account import CONSOLE, Account, Disabled, NotThere, entering, last
from gpuctl.stacks.gcp.leaks import LABEL
from gpuctl.stacks.gcp.zones import sold
from gpuctl.stacks.machines import MachineType
from gpuctl.stacks.request import StackRequest

_GPU_PAGE = "https://cloud.google.com/compute/docs/gpus/gpu-regions-zones"
_GPU_QUOTAS = {
    "A100-40GB": "NVIDIA_A100_GPUS",
    "A100-80GB": "NVIDIA_A100_80GB_GPUS",
    "H100-80GB": "NVIDIA_H100_GPUS",
    "L4": "NVIDIA_L4_GPUS",
    "T4": "NVIDIA_T4_GPUS",
    "V100-16GB": "NVIDIA_V100_GPUS",
}
_CPU_QUOTAS = {"a2-highgpu": "A2_CPUS", "a2-ultragpu": "A2_CPUS", "n1": "CPUS"}
"""Families that are not here have no quota of vCPUs that Compute Engine tells of."""
_ALL_GPUS = "GPUS_ALL_REGIONS"
_RIGHTS = (
    *("compute.networks.create", "compute.networks.delete", "compute.subnetworks.create"),
    *("compute.subnetworks.delete", "compute.firewalls.create", "compute.firewalls.delete"),
    *("compute.instanceTemplates.create", "compute.instanceTemplates.delete", "compute.resourcePolicies.create"),
    *("compute.resourcePolicies.delete", "compute.instanceGroupManagers.create"),
    *("compute.instanceGroupManagers.update", "compute.instanceGroupManagers.delete", "compute.instances.create"),
    *("compute.instances.delete", "compute.instances.setMetadata", "compute.instances.setLabels"),
    *("compute.instances.setServiceAccount", "compute.disks.create", "compute.subnetworks.use"),
    *("compute.subnetworks.useExternalIp", "iam.serviceAccounts.create", "iam.serviceAccounts.delete"),
    *("iam.serviceAccounts.actAs", "iam.roles.create", "iam.roles.delete", "resourcemanager.projects.setIamPolicy"),
    *("storage.buckets.create", "storage.buckets.setIamPolicy", "resourcemanager.tagKeys.create"),
    *("resourcemanager.tagKeys.delete", "resourcemanager.tagValues.create", "resourcemanager.tagValues.delete"),
    *("resourcemanager.tagValueBindings.create", "compute.instanceGroupManagers.createTagBinding"),
)
"""What ``up`` and ``down`` ask for (see ``network``, ``identity``, ``storage``, ``group``), without what goes with it.
The group's tag is below the project, and so its rights are the project's too:
cloud.google.com/resource-manager/docs/tags/tags-creating-and-managing, "Required permissions"."""


def checks(request: StackRequest, machine: MachineType, account: Account | None = None) -> list[Check]:
    """All at once, but for credentials and the project: without them nothing else can be asked."""
    try:
        account = account or entering(request.account)
        credentials = Check.ok("credentials", account.log_in().who)
    except CredentialsRefused as error:
        return [Check.fail("credentials", str(error), f"{CONSOLE}/apis/credentials")]
    except GpuctlError as error:  # nobody answers
        return [Check.fail("credentials", str(error))]
    try:
        project = account.compute("Projects", "get")
    except Disabled:  # a fresh project: this service is not the only one
        return [credentials, Check.of("services", lambda: _services(account))]
    except GpuctlError as error:
        return [credentials, Check.fail("project", str(error), f"{CONSOLE}/cloud-resource-manager")]
    return [
        credentials,
        Check.ok("project", account.project),
        Check.of("services", lambda: _services(account)),
        Check.of("region", lambda: _region(request, account)),
        Check.of("machines", lambda: _machines(request, machine, account)),
        Check.of("permissions", lambda: _permissions(account)),
        Check.of("quota", lambda: _quota(request, machine, account, project)),
    ]


def _services(account: Account) -> Check:
    """All that are needed and not there, so that they are enabled at once."""
    at = account.project
    asking: dict[str, Callable[[], object]] = {
        "compute": lambda: account.compute("Projects", "get"),
        "iam": lambda: account.ask("iam", f"v1/projects/{at}/roles", query={"pageSize": 1}),
        "cloudresourcemanager": lambda: account.ask(
            "cloudresourcemanager", "v3/tagKeys", query={"parent": f"projects/{at}", "pageSize": 1}
        ),
        "storage": lambda: account.ask("storage", "storage/v1/b", query={"project": at, "maxResults": 1}),
    }
    if missing := [f"{name}.googleapis.com" for name, ask in asking.items() if not _is_enabled(ask)]:
        how = f"gcloud services enable {' '.join(missing)} --project {at}"
        return Check.fail(
            "services",
            f"the project has not enabled {', '.join(missing)}; {how}",
            f"{CONSOLE}/apis/library?project={at}",
        )
    return Check.ok("services", f"{', '.join(asking)} are enabled")


def _is_enabled(ask: Callable[[], object]) -> bool:
    """A service that refuses is there. Raises ``GpuctlError`` if nobody answers."""
    try:
        ask()
    except Disabled:
        return False
    except (Denied, NotThere):
        pass
    return True


def _region(request: StackRequest, account: Account) -> Check:
    try:
        region = account.compute("Regions", "get", region=request.region)
    except NotThere:
        names = ", ".join(sorted(one.name for one in account.listed("Regions")))
        return Check.fail("region", f"{request.region!r} is no region of Google Cloud; there are: {names}")
    zones = {last(url) for url in region.zones}
    if foreign := [zone for zone in request.zones if zone not in zones]:
        return Check.fail("region", f"{foreign[0]} is no zone of {region.name}; --zone {' or '.join(sorted(zones))} is")
    if region.status == "DOWN":
        return Check.fail("region", f"{region.name} is down", "https://status.cloud.google.com")
    return Check.ok("region", region.name)


def _machines(request: StackRequest, machine: MachineType, account: Account) -> Check:
    found = sold(machine, account)
    here = sorted(zone for zone in found if zone.rpartition("-")[0] == request.region)
    if not here:
        return Check.fail(
            "machines", f"there is no {machine.name} in {request.region}; take another --region or --type", _GPU_PAGE
        )
    if missing := [zone for zone in request.zones if zone not in here]:
        return Check.fail(
            "machines",
            f"there is no {machine.name} in {', '.join(missing)}; --zone {' or '.join(here)} has it",
            _GPU_PAGE,
        )
    return Check.ok("machines", f"{machine.name} is sold in {', '.join(request.zones or here)}")


def _permissions(account: Account) -> Check:
    page = f"{CONSOLE}/iam-admin/iam?project={account.project}"
    asked = {"permissions": list(_RIGHTS)}
    answer = account.ask("cloudresourcemanager", f"v1/projects/{account.project}:testIamPermissions", asked)
    granted = set(answer.get("permissions", ()))
    if denied := [right for right in _RIGHTS if right not in granted]:
        more = f" and {len(denied) - 4} more" if len(denied) > 4 else ""
        return Check.fail("permissions", f"these credentials lack {', '.join(denied[:4])}{more}", page)
    return Check.ok("permissions", f"all {len(_RIGHTS)} that up and down need")


# -- quota ------------------------------------------------------------------------------------------------------------


def quotas(request: StackRequest, machine: MachineType) -> tuple[tuple[str, int], ...]:
    """Names of a region's quotas that a machine on demand counts against, and by how much; that of its GPUs first."""
    cpus = _CPU_QUOTAS.get(machine.family)
    return (
        (_GPU_QUOTAS[machine.gpu], machine.gpus),
        *(((cpus, machine.vcpus),) if cpus else ()),
        ("SSD_TOTAL_GB", request.disk_gb),  # pd-balanced is of SSDs: see ``group``
        ("IN_USE_ADDRESSES", 1),
    )


def _quota(request: StackRequest, machine: MachineType, account: Account, project: Any) -> Check:
    """Each that is too small, or the one of the GPUs. A region's, and those of the whole project."""
    region = _limits(account.compute("Regions", "get", region=request.region))
    whole = _limits(project)
    nodes = request.nodes_max - _own(request, account)
    told: list[tuple[bool, str]] = []
    for name, each in quotas(request, machine):
        counted = _of_spot(name, region) if request.spot else name
        if counted in region:
            told.append(_enough(f"{counted} in {request.region}", *region[counted], nodes * each))
    if _ALL_GPUS in whole:  # projects that were never limited do not have it
        told.append(_enough(_ALL_GPUS, *whole[_ALL_GPUS], nodes * machine.gpus))
    page = f"{CONSOLE}/iam-admin/quotas?project={account.project}"
    if short := [said for enough, said in told if not enough]:
        return Check.fail("quota", "; ".join(short), page)
    if not any(name in region for name in _names(_GPU_QUOTAS[machine.gpu], request)):
        said = f"Compute Engine does not tell the quota of {machine.gpu} in {request.region}"
        return Check(name="quota", status="unknown", message=said, page=page)
    others = f", and {len(told) - 1} others are enough" if len(told) > 1 else ""
    return Check.ok("quota", f"{told[0][1]}{others}")


def _names(name: str, request: StackRequest) -> tuple[str, ...]:
    return (f"PREEMPTIBLE_{name}", name) if request.spot else (name,)


def _of_spot(name: str, limits: Mapping[str, tuple[float, float]]) -> str:
    """Spot machines have quotas of their own where a project was granted any, and share the usual ones where not:
    cloud.google.com/compute/docs/instances/spot, "Quotas"."""
    own = f"PREEMPTIBLE_{'CPUS' if name.endswith('CPUS') else name}"
    granted = own in limits and limits[own][0] > 0
    return own if granted or name not in limits else name


def _limits(of: Any) -> dict[str, tuple[float, float]]:
    """Limit and usage by name, of a region or a project."""
    return {quota.metric: (quota.limit, quota.usage) for quota in of.quotas}


def _enough(name: str, most: float, used: float, needed: int) -> tuple[bool, str]:
    if most == 0:
        return needed == 0, f"{name} is 0"
    return used + needed <= most, f"{name}: {most:g}, {used:g} in use, {needed} more needed"


def _own(request: StackRequest, account: Account) -> int:
    """Machines that the cluster has already: they are in the usage, and are asked for again."""
    asked = {"filter": f"labels.{LABEL}={request.cluster}"}
    found = account.everywhere("Instances", "instances", **asked)
    mine = [one for scope, one in found if one.labels.get(LABEL) == request.cluster and request.region in scope]
    return min(len(mine), request.nodes_max)
