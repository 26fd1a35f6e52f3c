"""``gpuctl check``: checks whether a cloud would provide the machines."""

from __future__ import annotations

from typing import Annotated

import msgspec

from gpuctl.cli.render.terminal import count, out, out_json, say
from gpuctl.cli.session.rental_plan import (
    Bucket,
    Gpu,
    Gpus,
    MachineFlags,
    Placement,
    RegionFlag,
    Spot,
    Type,
    Zone,
    last_of,
    request_of,
    standing,
)
from gpuctl.cli.settings.options import Cluster, Output, text_option, wants_json
from gpuctl.cli.settings.resolve import load
from gpuctl.cluster.errors import GpuctlError
from gpuctl.stacks.catalog.instance_types import catalog
from gpuctl.stacks.catalog.region_names import is_known
from gpuctl.stacks.clouds.interface import cloud
from gpuctl.stacks.engine import pulumi_install


def verb(
    provider: Annotated[str | None, text_option("--provider", metavar="NAME", about="aws, gcp or azure.")] = None,
    nodes: Annotated[str | None, text_option("--nodes", "-n", metavar="N|MIN:MAX", about="How many.")] = None,
    machine_type: Type = None,
    gpu: Gpu = None,
    gpus: Gpus = None,
    region: RegionFlag = None,
    zone: Zone = None,
    spot: Spot = None,
    placement: Placement = None,
    bucket: Bucket = None,
    cluster: Cluster = None,
    output: Output = "text",
) -> None:
    """Check whether a cloud would provide these machines.

    Credentials, region, machines in the zone, permissions, quota and the account's other limits, and whether Pulumi and
    its plug-in are here. Nothing is created. Exits 1 if one of these checks fails.
    """
    as_json = wants_json(output)
    settings = standing(load({"cluster": cluster, "provider": provider, "nodes": nodes, "bucket": bucket}))
    there = cloud(settings.provider)
    name = there.name
    machines = MachineFlags(machine_type, gpu, gpus, region, zone, spot, placement=placement)
    request = request_of(settings, name, machines, last_of(settings), new_region=True)
    if not is_known(name, request.region):
        say(f"warning: the catalog does not have {request.region}; asking {name}")
    found = (*there.checks(request, catalog().type(request.type, name)), *pulumi_install.checks(name))
    if as_json:
        out_json({"type": request.type, "region": request.region, "checks": msgspec.to_builtins(found)})
    else:
        for one in found:
            out(f"{one.status:7}  {one.name:11}  {one.message}" + (f"; see {one.page}" if one.page else ""))
    if failed := [one.name for one in found if one.status == "fail"]:
        raise GpuctlError(f"{count(len(failed), 'check')} failed: {', '.join(failed)}")
