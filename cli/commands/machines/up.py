"""``gpuctl up``: creates a cluster, or what is missing of it."""

from __future__ import annotations

from typing import Annotated

import typer

from gpuctl.cli.render.dialog import TerminalDialog
from gpuctl.cli.render.terminal import count, out, say
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
    standing,
)
from gpuctl.cli.session.renting import TermFlags, minutes, rent
from gpuctl.cli.settings.options import Cluster, Output, parse_flag, text_option, wants_json
from gpuctl.cli.settings.resolve import Settings, load
from gpuctl.cli.signals import Interrupted, as_interrupts
from gpuctl.cluster.errors import BadInput
from gpuctl.cluster.jobs import queue
from gpuctl.cluster.storage.bucket import open_bucket
from gpuctl.cluster.storage.error_mapping import shown
from gpuctl.stacks.catalog.instance_types import CLOUDS
from gpuctl.stacks.providers.interface import RentsMachines, UpRequest, UsesMachines
from gpuctl.stacks.providers.interface import provider as provider_named
from gpuctl.stacks.request import last_request
from gpuctl.stacks.state import clusters
from gpuctl.stacks.state.clusters import KnownCluster, command


def verb(
    nodes: Annotated[
        str | None, text_option("--nodes", "-n", metavar="N|MIN:MAX", about="Number of nodes; 2:4 accepts from 2 to 4.")
    ] = None,
    provider: Annotated[
        str | None,
        text_option(
            "--provider",
            metavar="NAME",
            about="local, ssh, aws, gcp or azure (default: the cluster's own, else local).",
        ),
    ] = None,
    hosts: Annotated[
        str | None, text_option("--hosts", metavar="A,B,C", about="Machines for provider ssh, as [USER@]HOST[:PORT].")
    ] = None,
    slots: Annotated[
        str | None, text_option("--slots", metavar="K", about="Worker processes per node (default: its GPUs, else 1).")
    ] = None,
    bucket: Bucket = None,
    backend: Annotated[
        str | None,
        text_option("--backend", metavar="URL", about="Where Pulumi keeps its state (default: this machine)."),
    ] = None,
    machine_type: Type = None,
    gpu: Gpu = None,
    gpus: Gpus = None,
    region: RegionFlag = None,
    zone: Zone = None,
    spot: Spot = None,
    ssh_from: Annotated[
        str | None,
        text_option("--ssh-from", metavar="me|NETWORK", about="Network allowed to log in, such as 203.0.113.7/32."),
    ] = None,
    ssh_key: Annotated[
        str | None,
        text_option("--ssh-key", metavar="FILE", about="Public key (default: ~/.ssh/id_ed25519.pub, id_rsa.pub)."),
    ] = None,
    image: Annotated[
        str | None,
        text_option("--image", metavar="ID", about="Machine image (default: the cloud's own with a driver)."),
    ] = None,
    placement: Placement = None,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify/--no-verify",
            help="Test a new cluster's EFA or InfiniBand; takes a minute.",
            show_default="if the nodes have one",
        ),
    ] = True,
    wait: Annotated[
        str | None,
        text_option("--wait", metavar="MINUTES", about="Minutes to wait for machines in each zone (default: 10)."),
    ] = None,
    idle_minutes: Annotated[
        str | None,
        text_option(
            "--idle-minutes", metavar="N", about="Minutes until an idle machine shuts down (default: 15; 0: never)."
        ),
    ] = None,
    hold_ill_minutes: Annotated[
        str | None,
        text_option(
            "--hold-ill", metavar="TIME", about="Keep a node with an ill GPU before replacing it (30m, 1h; default: 0)."
        ),
    ] = None,
    stall_minutes: Annotated[
        str | None,
        text_option("--stall-minutes", metavar="N", about="Minutes until a hung job is ended (default: 30; 0: never)."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Skip the confirmation of costs.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Clear what a crashed update left, such as its lock.")] = False,
    skip_check: Annotated[
        str | None,
        text_option("--skip-check", metavar="NAME[,NAME]", about="Go on though `gpuctl check` says that this fails."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be created, and the price.")] = False,
    output: Output = "text",
    cluster: Cluster = None,
) -> None:
    """Create a cluster, or what is missing of it.

    Repeat it to replace lost nodes or to change the cluster; options you leave out keep their values.
    --dry-run needs no credentials.
    """
    as_json = wants_json(output)
    flags = {"cluster": cluster, "provider": provider, "nodes": nodes, "slots": slots, "bucket": bucket}
    settings = standing(load(flags | {"backend": backend, "hosts": hosts}))
    if hosts is not None and settings.provider != "ssh":
        raise BadInput("--hosts applies to provider ssh only", "add --provider ssh")
    machines = MachineFlags(
        machine_type, gpu, gpus, region, zone, spot, ssh_from, ssh_key, image=image, placement=placement
    )
    terms = TermFlags(
        wait,
        idle_minutes,
        stall_minutes,
        hold_ill_minutes,
        skip_check,
        yes=yes,
        force=force,
        dry_run=dry_run,
        as_json=as_json,
    )
    there = provider_named(settings.provider, TerminalDialog(yes=yes))
    if isinstance(there, RentsMachines):
        if not dry_run:
            _refuse_two_of_a_name(settings)
        rented = rent(there, settings, machines, terms)
        if rented is not None:
            _tell(rented, settings.nodes)
            if verify:
                from gpuctl.cli.session.verify_job import verify_new  # brings what reads a job's output

                with as_interrupts():
                    verify_new(open_bucket(rented.bucket), settings)
        return
    if refused := [*machines.given(), *terms.given(), *(["--backend"] if backend else [])]:
        raise BadInput(
            f"{refused[0]} applies to clouds only, not to provider {settings.provider}",
            f"use --provider {', '.join(CLOUDS[:-1])} or {CLOUDS[-1]}",
        )
    assert isinstance(there, UsesMachines)
    _refuse_two_of_a_name(settings)
    says_nodes = settings.found["nodes"].source != "default"
    request = UpRequest(
        name=settings.cluster,
        nodes_min=settings.nodes[0] if says_nodes else None,
        nodes_max=settings.nodes[1] if says_nodes else None,
        slots=settings.slots,
        bucket=settings.bucket,
        hosts=settings.hosts,
        stall_minutes=parse_flag("--stall-minutes", stall_minutes, minutes),
    )
    with as_interrupts():
        try:
            made = there.up(request)
        except KeyboardInterrupt as error:
            raise Interrupted(_what_runs(settings.cluster)) from error
    spec = queue.cluster_spec(open_bucket(made.bucket))
    _tell(made, (spec.nodes_min, spec.nodes_max))


def _what_runs(name: str) -> str:
    """Tell what runs, and costs, after an ``up`` that was interrupted."""
    if clusters.get(name) is None:
        return "interrupted"
    return (
        f"interrupted; nodes of cluster {name} that were started keep running\n"
        f"  continue: {command('up', name)}\n"
        f"  stop:     {command('down', name)}"
    )


def _refuse_two_of_a_name(settings: Settings) -> None:
    """The second would hide the first, which may cost money."""
    there = last_request.recalled(settings.cluster)
    if there and there.provider != settings.provider:
        raise BadInput(
            f"cluster {there.name} already exists, on provider {there.provider}",
            f"choose another name with --cluster, or run `{command('down', there.name)}` first",
        )


def _tell(made: KnownCluster, nodes: tuple[int, int]) -> None:
    fewest, most = nodes
    size = count(most, "node") if fewest == most else f"{fewest} to {most} nodes"
    out(f"cluster {made.name} is up: {size} ({made.provider})")
    out(f"bucket: {shown(made.bucket)}")
    say(f"next: {command('train script.py', made.name)}")
