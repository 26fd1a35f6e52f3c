"""``gpuctl check``"""

from __future__ import annotations

from typing import Annotated

import msgspec

from gpuctl.cli.options import Cluster, Output, text_option, wants_json
from gpuctl.cli.plan import Gpu, Gpus, MachineFlags, Region, Spot, Type, Zone, last_of, request_of, standing
from gpuctl.cli.settings import load
from gpuctl.cli.terminal import count, out, out_json
from gpuctl.cluster.errors import BadInput, GpuctlError
from gpuctl.stacks.cloud import cloud
from gpuctl.stacks.machines import CLOUDS, catalog


def verb(
    provider: Annotated[str | None, text_option("--provider", metavar="NAME", about="aws, gcp or azure.")] = None,
    nodes: Annotated[str | None, text_option("--nodes", "-n", metavar="N|MIN:MAX", about="How many.")] = None,
    machine_type: Type = None,
    gpu: Gpu = None,
    gpus: Gpus = None,
    region: Region = None,
    zone: Zone = None,
    spot: Spot = None,
    cluster: Cluster = None,
    output: Output = "text",
) -> None:
    """Ask a cloud whether it would give these machines.

    Credentials, region, machines in the zone, permissions and quota. Nothing is created. Exits 1 if one of them fails.
    """
    as_json = wants_json(output)
    settings = standing(load({"cluster": cluster, "provider": provider, "nodes": nodes}))
    name = settings.provider
    if name not in CLOUDS:
        raise BadInput(f"{name!r} is no cloud", f"add --provider, one of: {', '.join(CLOUDS)}")
    there = cloud(name)
    machines = MachineFlags(machine_type, gpu, gpus, region, zone, spot)
    request = request_of(settings, name, machines, last_of(settings))
    found = there.checks(request, catalog().type(request.type, name))
    if as_json:
        out_json({"type": request.type, "region": request.region, "checks": msgspec.to_builtins(found)})
    else:
        for one in found:
            out(f"{one.status:7}  {one.name:11}  {one.message}" + (f"; see {one.page}" if one.page else ""))
    if failed := [one.name for one in found if one.status == "fail"]:
        raise GpuctlError(f"{count(len(failed), 'check')} failed: {', '.join(failed)}")
