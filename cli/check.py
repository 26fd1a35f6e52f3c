"""``gpuctl check``"""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from gpuctl.cli.options import Cluster, Output, text_option, wants_json
from gpuctl.cli.plan import MachineFlags, request_of
from gpuctl.cli.settings import load
from gpuctl.cli.terminal import count, out, out_json
from gpuctl.cluster.errors import BadInput, GpuctlError
from gpuctl.stacks.cloud import ChecksAccount, cloud
from gpuctl.stacks.machines import CLOUDS, catalog


def verb(
    provider: Annotated[str | None, text_option("--provider", metavar="NAME", about="aws, gcp or azure.")] = None,
    nodes: Annotated[str | None, text_option("--nodes", "-n", metavar="N|MIN:MAX", about="How many.")] = None,
    machine_type: Annotated[
        str | None, text_option("--type", metavar="NAME", about="Instance type (default: the cheapest that fits).")
    ] = None,
    gpu: Annotated[
        str | None, text_option("--gpu", metavar="NAME", about="Such as A100, where no type is named.")
    ] = None,
    gpus: Annotated[str | None, text_option("--gpus", metavar="N", about="GPUs of each machine, the same.")] = None,
    region: Annotated[str | None, text_option("--region", metavar="NAME", about="Such as us-east-1.")] = None,
    zone: Annotated[str | None, text_option("--zone", metavar="NAME", about="Such as us-east-1b.")] = None,
    on_demand: Annotated[
        bool, typer.Option("--on-demand", help="Machines that are not taken away, at full price.")
    ] = False,
    cluster: Cluster = None,
    output: Output = "text",
) -> None:
    """Ask a cloud whether it would give these machines.

    Credentials, region, machines in the zone, permissions and quota. Nothing is created. Exits 1 if one of them fails.
    """
    as_json = wants_json(output)
    settings = load({"cluster": cluster, "provider": provider, "nodes": nodes})
    name = settings.provider
    if name not in CLOUDS:
        raise BadInput(f"{name!r} is no cloud", f"add --provider, one of: {', '.join(CLOUDS)}")
    there = cloud(name)
    if not isinstance(there, ChecksAccount):
        raise BadInput(f"gpuctl cannot ask {name} yet", "gpuctl up --dry-run tells what it would create")
    request = request_of(settings, name, MachineFlags(machine_type, gpu, gpus, region, zone, on_demand))
    found = there.checks(request, catalog().type(request.type, name))
    if as_json:
        out_json({"type": request.type, "region": request.region, "checks": msgspec.to_builtins(found)})
    else:
        for one in found:
            out(f"{one.status:7}  {one.name:11}  {one.message}" + (f"; see {one.page}" if one.page else ""))
    if failed := [one.name for one in found if one.status == "fail"]:
        raise GpuctlError(f"{count(len(failed), 'check')} failed: {', '.join(failed)}")
