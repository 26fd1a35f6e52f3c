"""Checks that a project would get what a request wants: credentials, project, services, region, machines in the zone,
rights, quota.

Nothing is created. Capacity at this moment is not told: Google knows it only when it starts a machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from gpuctl.cluster.errors import BadInput, GpuctlError
from gpuctl.stacks.catalog.instance_types import MachineType
from gpuctl.stacks.clouds.answers import CredentialsRefused, Denied, PreflightCheck
from gpuctl.stacks.clouds.gcp import is_placed
from gpuctl.stacks.clouds.gcp.client import GcpAccount, entering, last
from gpuctl.stacks.clouds.gcp.error_mapping import CONSOLE, Disabled, NotFound, google
from gpuctl.stacks.clouds.gcp.ownership import LABEL
from gpuctl.stacks.clouds.gcp.zones import sold
from gpuctl.stacks.request.stack_request import StackRequest

_GPU_PAGE = "https://cloud.google.com/compute/docs/gpus/gpu-regions-zones"
_GPU_QUOTAS = {
    "A100-40GB": "NVIDIA_A100_GPUS",
    "A100-80GB": "NVIDIA_A100_80GB_GPUS",
    "H100-80GB": "NVIDIA_H100_GPUS",
    "L4": "NVIDIA_L4_GPUS",
    "T4": "NVIDIA_T4_GPUS",
    "V100-16GB": "NVIDIA_V100_GPUS",
}
_CPU_QUOTAS = {"a2-highgpu": "A2_CPUS", "a2-megagpu": "A2_CPUS", "a2-ultragpu": "A2_CPUS", "n1": "CPUS"}
"""Families that are not here have no quota of vCPUs that Compute Engine tells of."""
_ALL_GPUS = "GPUS_ALL_REGIONS"
_RIGHTS = (
    *("compute.networks.create", "compute.networks.delete", "compute.subnetworks.create"),
    *("compute.subnetworks.delete", "compute.firewalls.create", "compute.firewalls.delete"),
    *("compute.instanceTemplates.create", "compute.instanceTemplates.delete", "compute.instanceGroupManagers.create"),
    *("compute.instanceGroupManagers.update", "compute.instanceGroupManagers.delete", "compute.instances.create"),
    *("compute.instances.delete", "compute.instances.setMetadata", "compute.instances.setLabels"),
    *("compute.instances.setServiceAccount", "compute.disks.create", "compute.subnetworks.use"),
    *("compute.subnetworks.useExternalIp", "iam.serviceAccounts.create", "iam.serviceAccounts.delete"),
    *("iam.serviceAccounts.actAs", "iam.roles.create", "iam.roles.delete", "resourcemanager.projects.setIamPolicy"),
    *("resourcemanager.tagKeys.create", "resourcemanager.tagKeys.delete", "resourcemanager.tagValues.create"),
    *("resourcemanager.tagValues.delete", "resourcemanager.tagValueBindings.create"),
    "compute.instanceGroupManagers.createTagBinding",
)
"""What ``up`` and ``down`` ask for (see ``network``, ``identity``, ``group``), without what goes with it, whatever the
request. What depends on it is in ``rights``.
The group's tag is below the project, and so its rights are the project's too:
cloud.google.com/resource-manager/docs/tags/tags-creating-and-managing, "Required permissions"."""

_LETS_NODES_IN = "storage.buckets.setIamPolicy"


def checks(request: StackRequest, machine: MachineType, account: GcpAccount | None = None) -> list[PreflightCheck]:
    """All at once, but for credentials and the project: without them nothing else can be asked. Raises ``BadInput`` if
    Google's packages are not installed, which is no fault of the credentials."""
    google("google.cloud.compute_v1")
    try:
        account = account or entering(request.account)
        credentials = PreflightCheck.ok("credentials", account.log_in().who)
    except BadInput:
        raise
    except CredentialsRefused as error:
        return [PreflightCheck.fail("credentials", str(error), f"{CONSOLE}/apis/credentials")]
    except GpuctlError as error:  # nobody answers
        return [PreflightCheck.fail("credentials", str(error))]
    try:
        project = account.compute("Projects", "get")
    except Disabled:  # a fresh project: this service is not the only one
        return [credentials, PreflightCheck.of("services", lambda: _services(account))]
    except GpuctlError as error:
        return [credentials, PreflightCheck.fail("project", str(error), f"{CONSOLE}/cloud-resource-manager")]
    return [
        credentials,
        PreflightCheck.ok("project", account.project),
        PreflightCheck.of("services", lambda: _services(account)),
        PreflightCheck.of("region", lambda: _region(request, account)),
        PreflightCheck.of("machines", lambda: _machines(request, machine, account)),
        PreflightCheck.of("permissions", lambda: _permissions(request, machine, account)),
        PreflightCheck.of("quota", lambda: _quota(request, machine, account, project)),
    ]


def _services(account: GcpAccount) -> PreflightCheck:
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
        return PreflightCheck.fail(
            "services",
            f"the project has not enabled {', '.join(missing)}; {how}",
            f"{CONSOLE}/apis/library?project={at}",
        )
    return PreflightCheck.ok("services", f"{', '.join(asking)} are enabled")


def _is_enabled(ask: Callable[[], object]) -> bool:
    """A service that refuses is there. Raises ``GpuctlError`` if nobody answers."""
    try:
        ask()
    except Disabled:
        return False
    except (Denied, NotFound):
        pass
    return True


def _region(request: StackRequest, account: GcpAccount) -> PreflightCheck:
    try:
        region = account.compute("Regions", "get", region=request.region)
    except NotFound:
        names = ", ".join(sorted(one.name for one in account.listed("Regions")))
        return PreflightCheck.fail("region", f"unknown region {request.region!r} of Google Cloud; there are: {names}")
    zones = {last(url) for url in region.zones}
    if foreign := [zone for zone in request.zones if zone not in zones]:
        return PreflightCheck.fail(
            "region", f"{foreign[0]} is not a zone of {region.name}; --zone {' or '.join(sorted(zones))} is"
        )
    if region.status == "DOWN":
        return PreflightCheck.fail("region", f"{region.name} is down", "https://status.cloud.google.com")
    return PreflightCheck.ok("region", region.name)


def _machines(request: StackRequest, machine: MachineType, account: GcpAccount) -> PreflightCheck:
    found = sold(machine, account)
    here = sorted(zone for zone in found if zone.rpartition("-")[0] == request.region)
    if not here:
        return PreflightCheck.fail(
            "machines", f"there is no {machine.name} in {request.region}; use another --region or --type", _GPU_PAGE
        )
    if missing := [zone for zone in request.zones if zone not in here]:
        return PreflightCheck.fail(
            "machines",
            f"there is no {machine.name} in {', '.join(missing)}; --zone {' or '.join(here)} has it",
            _GPU_PAGE,
        )
    return PreflightCheck.ok("machines", f"{machine.name} is sold in {', '.join(request.zones or here)}")


def rights(request: StackRequest, machine: MachineType) -> tuple[str, ...]:
    """The permissions in the project that ``up`` and ``down`` need for this request. A bucket that is there already
    grants its own (see ``_LETS_NODES_IN``)."""
    placement = ("compute.resourcePolicies.create", "compute.resourcePolicies.delete")
    bucket = ("storage.buckets.create", _LETS_NODES_IN)
    return (*_RIGHTS, *(placement if is_placed(request, machine) else ()), *(() if request.bucket else bucket))


def _permissions(request: StackRequest, machine: MachineType, account: GcpAccount) -> PreflightCheck:
    page = f"{CONSOLE}/iam-admin/iam?project={account.project}"
    wanted = rights(request, machine)
    asked = {"permissions": list(wanted)}
    answer = account.ask("cloudresourcemanager", f"v1/projects/{account.project}:testIamPermissions", asked)
    granted = set(answer.get("permissions", ()))
    denied = [right for right in wanted if right not in granted]
    if request.bucket:
        bucket, query = request.place().name, {"permissions": _LETS_NODES_IN}
        try:
            answer = account.ask("storage", f"storage/v1/b/{bucket}/iam/testPermissions", query=query)
        except NotFound:
            return PreflightCheck.fail("permissions", f"there is no bucket {bucket}", f"{CONSOLE}/storage/browser")
        denied += [f"{_LETS_NODES_IN} on {bucket}"] if _LETS_NODES_IN not in answer.get("permissions", ()) else []
    if denied:
        more = f" and {len(denied) - 4} more" if len(denied) > 4 else ""
        return PreflightCheck.fail("permissions", f"these credentials lack {', '.join(denied[:4])}{more}", page)
    return PreflightCheck.ok("permissions", f"all {len(wanted) + bool(request.bucket)} that up and down need")


# -- quota ------------------------------------------------------------------------------------------------------------


def quotas(request: StackRequest, machine: MachineType) -> tuple[tuple[str, int], ...]:
    """Names of a region's quotas that a machine on demand counts against, and by how much; that of its GPUs first."""
    cpus = _CPU_QUOTAS.get(machine.family)
    return (
        (_gpu_quota(machine), machine.gpus),
        *(((cpus, machine.vcpus),) if cpus else ()),
        ("SSD_TOTAL_GB", request.disk_gb),  # both of ``disk_type`` are of SSDs
        ("IN_USE_ADDRESSES", 1),
    )


def _gpu_quota(machine: MachineType) -> str:
    """The H100s of A3 Mega have one of their own."""
    return "NVIDIA_H100_MEGA_GPUS" if machine.family == "a3-megagpu" else _GPU_QUOTAS[machine.gpu]


def _quota(request: StackRequest, machine: MachineType, account: GcpAccount, project: Any) -> PreflightCheck:
    """Each that is too small, or the one of the GPUs. A region's, and those of the whole project."""
    region = _limits(account.compute("Regions", "get", region=request.region))
    whole = _limits(project)
    nodes = request.nodes_max - _own(request, account)
    told: list[tuple[bool, str]] = []
    for name, each in quotas(request, machine):
        counted = _of_spot(name, region) if request.spot else name
        if counted in region:
            told.append(_enough(f"{counted} in {request.region}", *region[counted], nodes * each))
    once = _once(request, account)
    for name, needed in once.items():
        if name in whole:
            told.append(_enough(name, *whole[name], needed))
    if _ALL_GPUS in whole:  # projects that were never limited do not have it
        told.append(_enough(_ALL_GPUS, *whole[_ALL_GPUS], nodes * machine.gpus))
    page = f"{CONSOLE}/iam-admin/quotas?project={account.project}"
    if short := [said for enough, said in told if not enough]:
        return PreflightCheck.fail("quota", "; ".join(short), page)
    if not any(name in region for name in _names(_gpu_quota(machine), request)):
        said = f"Compute Engine does not report the quota of {machine.gpu} in {request.region}"
        return PreflightCheck(name="quota", status="unknown", message=said, page=page)
    others = f", and {len(told) - 1} others are enough" if len(told) > 1 else ""
    return PreflightCheck.ok("quota", f"{told[0][1]}{others}")


def _once(request: StackRequest, account: GcpAccount) -> dict[str, int]:
    """The project's quotas for what a cluster has one or two of, whatever its size: how many of them are not there yet.
    A fresh project may have five networks, and an ``up`` that meets that limit has made half of its things."""
    name, rule = request.named(63), request.named(57)
    rules = [f"{rule}-nodes", *([f"{rule}-ssh"] if request.ssh_from else [])]
    here: dict[str, list[Callable[[], object]]] = {
        "NETWORKS": [partial(account.compute, "Networks", "get", network=name)],
        "SUBNETWORKS": [partial(account.compute, "Subnetworks", "get", region=request.region, subnetwork=name)],
        "FIREWALLS": [partial(account.compute, "Firewalls", "get", firewall=one) for one in rules],
    }
    return {quota: sum(not _is_there(ask) for ask in asking) for quota, asking in here.items()}


def _is_there(ask: Callable[[], object]) -> bool:
    try:
        ask()
    except NotFound:
        return False
    return True


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


def _own(request: StackRequest, account: GcpAccount) -> int:
    """Machines that the cluster has already: they are in the usage, and are asked for again."""
    asked = {"filter": f"labels.{LABEL}={request.cluster}"}
    found = account.everywhere("Instances", "instances", **asked)
    mine = [one for scope, one in found if one.labels.get(LABEL) == request.cluster and request.region in scope]
    return min(len(mine), request.nodes_max)
