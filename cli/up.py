"""``gpuctl up``"""

from __future__ import annotations

from typing import Annotated

import typer

from gpuctl.cli.options import Cluster, Output, text_option, wants_json
from gpuctl.cli.plan import Gpu, Gpus, MachineFlags, Region, Spot, Type, Zone, standing
from gpuctl.cli.renting import TermFlags, rent
from gpuctl.cli.settings import Settings, load
from gpuctl.cli.terminal import count, out, say
from gpuctl.cluster.errors import BadInput
from gpuctl.cluster.refusals import shown
from gpuctl.stacks import known
from gpuctl.stacks.known import KnownCluster
from gpuctl.stacks.machines import CLOUDS


def verb(
    nodes: Annotated[
        str | None, text_option("--nodes", "-n", metavar="N|MIN:MAX", about="How many; 2:4 goes on with 2 of 4.")
    ] = None,
    provider: Annotated[
        str | None, text_option("--provider", metavar="NAME", about="Where (default: where it is, else local).")
    ] = None,
    hosts: Annotated[
        str | None, text_option("--hosts", metavar="A,B,C", about="Provider ssh: the machines, as [USER@]HOST[:PORT].")
    ] = None,
    slots: Annotated[
        str | None, text_option("--slots", metavar="K", about="Worker processes per node (default: its GPUs, else 1).")
    ] = None,
    bucket: Annotated[
        str | None, text_option("--bucket", metavar="URL", about="Where its state and checkpoints go.")
    ] = None,
    backend: Annotated[
        str | None, text_option("--backend", metavar="URL", about="Where Pulumi keeps its state (default: here).")
    ] = None,
    machine_type: Type = None,
    gpu: Gpu = None,
    gpus: Gpus = None,
    region: Region = None,
    zone: Zone = None,
    spot: Spot = None,
    ssh_from: Annotated[
        str | None, text_option("--ssh-from", metavar="me|NETWORK", about="Who may log in, such as 203.0.113.7/32.")
    ] = None,
    ssh_key: Annotated[
        str | None, text_option("--ssh-key", metavar="FILE", about="Public key (default: ~/.ssh/id_ed25519.pub).")
    ] = None,
    image: Annotated[
        str | None,
        text_option("--image", metavar="ID", about="Machine image (default: the cloud's own with a driver)."),
    ] = None,
    placement: Annotated[
        bool | None,
        typer.Option(
            "--placement/--no-placement",
            help="Side by side, where they have a fabric; apart they are slower, and easier to get.",
            show_default="side by side",
        ),
    ] = None,
    wait: Annotated[
        str | None, text_option("--wait", metavar="MINUTES", about="For machines, in each zone (default: 10).")
    ] = None,
    idle_minutes: Annotated[
        str | None,
        text_option("--idle-minutes", metavar="N", about="A machine without work ends itself (default: 15; 0: never)."),
    ] = None,
    stall_minutes: Annotated[
        str | None,
        text_option("--stall-minutes", metavar="N", about="A job that does nothing is ended (default: 30; 0: never)."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before it costs money.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Clear what a crashed update has left, such as its lock.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what it would create, and the price.")] = False,
    output: Output = "text",
    cluster: Cluster = None,
) -> None:
    """Make a cluster, or what is missing of it.

    Repeat it to replace nodes that were lost, or to change what the cluster is: what is not said stays as it was.
    --dry-run needs no credentials.
    """
    as_json = wants_json(output)
    flags = {"cluster": cluster, "provider": provider, "nodes": nodes, "slots": slots, "bucket": bucket}
    settings = standing(load(flags | {"backend": backend, "hosts": hosts}))
    if hosts is not None and settings.provider != "ssh":
        raise BadInput("--hosts is for machines of your own", "add --provider ssh")
    machines = MachineFlags(
        machine_type, gpu, gpus, region, zone, spot, ssh_from, ssh_key, image=image, placement=placement
    )
    terms = TermFlags(wait, idle_minutes, stall_minutes, yes=yes, force=force, dry_run=dry_run, as_json=as_json)
    if settings.provider in CLOUDS:
        if not dry_run:
            _refuse_two_of_a_name(settings)
        rented = rent(settings, settings.provider, machines, terms)
        if rented is not None:
            _tell(rented, settings.nodes)
        return
    if refused := [*machines.given(), *terms.given(), *(["--backend"] if backend else [])]:
        raise BadInput(f"{refused[0]} is for clouds", f"add --provider, one of: {', '.join(CLOUDS)}")
    from gpuctl.stacks.provider import UpRequest
    from gpuctl.stacks.provider import provider as provider_named

    there = provider_named(settings.provider)
    _refuse_two_of_a_name(settings)
    fewest, most = settings.size
    request = UpRequest(
        name=settings.cluster,
        nodes_min=fewest,
        nodes_max=most,
        slots=settings.slots,
        bucket=settings.bucket,
        hosts=settings.hosts,
        stall_minutes=terms.of_nodes(settings.slots).stall_minutes,
    )
    _tell(there.up(request, say), settings.size)


def _refuse_two_of_a_name(settings: Settings) -> None:
    """The second would hide the first, which may cost money."""
    there = known.get(settings.cluster)
    if there and there.provider != settings.provider:
        raise BadInput(
            f"there is a cluster {there.name} already, of provider {there.provider}",
            "choose another name with --cluster, or run `gpuctl down` first",
        )


def _tell(made: KnownCluster, nodes: tuple[int, int]) -> None:
    fewest, most = nodes
    size = count(most, "node") if fewest == most else f"{fewest} to {most} nodes"
    out(f"cluster {made.name} is up: {size} ({made.provider})")
    out(f"bucket: {shown(made.bucket)}")
    option = "" if made.name == "default" else f" --cluster {made.name}"
    say(f"next: gpuctl train script.py{option}")
