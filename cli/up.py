"""``gpuctl up``"""

from __future__ import annotations

from typing import Annotated

import typer

from gpuctl.cli.options import Cluster, Output, text_option, wants_json
from gpuctl.cli.plan import Gpu, Gpus, MachineFlags, OnDemand, Region, Type, Zone, request_of, show
from gpuctl.cli.plan import as_json as plan_as_json
from gpuctl.cli.settings import Settings, load
from gpuctl.cli.terminal import count, out, out_json, say
from gpuctl.cluster.errors import BadInput
from gpuctl.cluster.refusals import shown
from gpuctl.stacks.machines import CLOUDS, CloudName


def verb(
    nodes: Annotated[
        str | None, text_option("--nodes", "-n", metavar="N|MIN:MAX", about="How many; 2:4 goes on with 2 of 4.")
    ] = None,
    provider: Annotated[str | None, text_option("--provider", metavar="NAME", about="Where (default: local).")] = None,
    slots: Annotated[
        str | None, text_option("--slots", metavar="K", about="Worker processes per node (default: its GPUs, else 1).")
    ] = None,
    bucket: Annotated[
        str | None, text_option("--bucket", metavar="URL", about="Where its state and checkpoints go.")
    ] = None,
    machine_type: Type = None,
    gpu: Gpu = None,
    gpus: Gpus = None,
    region: Region = None,
    zone: Zone = None,
    on_demand: OnDemand = False,
    ssh_from: Annotated[
        str | None, text_option("--ssh-from", metavar="NETWORK", about="Who may log in, such as 203.0.113.7/32.")
    ] = None,
    ssh_key: Annotated[
        str | None, text_option("--ssh-key", metavar="FILE", about="Public key (default: ~/.ssh/id_ed25519.pub).")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what it would create, and the price.")] = False,
    output: Output = "text",
    cluster: Cluster = None,
) -> None:
    """Make a cluster, or what is missing of it.

    Repeat it to replace nodes that were lost. --dry-run needs no credentials.
    """
    as_json = wants_json(output)
    flags = {"cluster": cluster, "provider": provider, "nodes": nodes, "slots": slots, "bucket": bucket}
    settings = load(flags)
    machines = MachineFlags(machine_type, gpu, gpus, region, zone, on_demand, ssh_from, ssh_key)
    if settings.provider in CLOUDS:
        _plan(settings, settings.provider, machines, dry_run=dry_run, as_json=as_json)
        return
    if refused := [*machines.given(), *(["--dry-run"] if dry_run else []), *(["-o json"] if as_json else [])]:
        raise BadInput(f"{refused[0]} is for clouds", f"add --provider, one of: {', '.join(CLOUDS)}")
    from gpuctl.stacks.provider import UpRequest
    from gpuctl.stacks.provider import provider as provider_named

    fewest, most = settings.nodes
    request = UpRequest(
        name=settings.cluster, nodes_min=fewest, nodes_max=most, slots=settings.slots, bucket=settings.bucket
    )
    made = provider_named(settings.provider).up(request, say)
    size = count(most, "node") if fewest == most else f"{fewest} to {most} nodes"
    out(f"cluster {made.name} is up: {size} ({made.provider})")
    out(f"bucket: {shown(made.bucket)}")
    option = "" if made.name == "default" else f" --cluster {made.name}"
    say(f"next: gpuctl train script.py{option}")


def _plan(settings: Settings, provider: CloudName, machines: MachineFlags, *, dry_run: bool, as_json: bool) -> None:
    if not dry_run:
        raise BadInput(
            f"gpuctl cannot create machines on {provider} yet",
            "add --dry-run to see what it would create, and the price",
        )
    request = request_of(settings, provider, machines)
    from gpuctl.stacks.planning import plan  # brings Pulumi

    made = plan(request)
    if as_json:
        out_json(plan_as_json(made))
    else:
        show(made)
    if made.errors:
        raise BadInput(f"{count(len(made.errors), 'thing')} would stop this", made.errors[0].hint)
