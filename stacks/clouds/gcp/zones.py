"""The zones of a region to try, the best first."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from gpuctl.cluster.errors import GpuctlError
from gpuctl.stacks.catalog.instance_types import MachineType, catalog
from gpuctl.stacks.clouds.gcp import shape
from gpuctl.stacks.clouds.gcp.client import GcpAccount, entering, last
from gpuctl.stacks.request.stack_request import StackRequest

_AT_ONCE = 8


def zones(request: StackRequest, account: GcpAccount | None = None) -> tuple[str, ...]:
    """Those that sell the type: for spot, by Google's own score of how likely as many machines are. It is not told of
    all types, nor to everybody. A region has one spot price. Raises ``GpuctlError``."""
    account = account or entering(request.account)
    machine = catalog().type(request.type, "gcp")
    here = sorted(zone for zone in sold(machine, account) if zone.rpartition("-")[0] == request.region)
    if not request.spot or len(here) < 2:
        return tuple(here)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        scores = dict(zip(here, pool.map(lambda zone: _score(request, machine, zone, account), here), strict=True))
    return tuple(sorted(here, key=lambda zone: (-scores[zone], zone)))


def sold(machine: MachineType, account: GcpAccount) -> set[str]:
    """Zones of all regions that have the type, and the GPUs that are hung on it. Raises ``GpuctlError``."""
    name, hung_on = shape(machine)
    found = _having("MachineTypes", "machine_types", name, account)
    return found & _having("AcceleratorTypes", "accelerator_types", hung_on[0], account) if hung_on else found


def _having(kind: str, field: str, name: str, account: GcpAccount) -> set[str]:
    found = account.everywhere(kind, field, filter=f"name={name}")
    return {last(scope) for scope, one in found if one.name == name}


def _score(request: StackRequest, machine: MachineType, zone: str, account: GcpAccount) -> float:
    """0 to 1; 0 where Google does not tell."""
    name, hung_on = shape(machine)
    selection: dict[str, object] = {"machine_types": [name]}
    if hung_on:
        selection["guest_accelerators"] = [{"accelerator_type": hung_on[0], "accelerator_count": hung_on[1]}]
    place = {"zone": f"projects/{account.project}/zones/{zone}"}
    asked = {
        "distribution_policy": {"target_shape": "ANY_SINGLE_ZONE", "zones": [place]},
        "instance_flexibility_policy": {"instance_selections": {"machine": selection}},
        "instance_properties": {"scheduling": {"provisioning_model": "SPOT"}},
        "size": request.nodes_max,
    }
    try:
        advice = account.compute("Advice", "capacity", region=request.region, capacity_advice_request_resource=asked)
    except GpuctlError:
        return 0.0
    return max((one.scores.obtainability for one in advice.recommendations), default=0.0)
