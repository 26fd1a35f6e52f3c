"""``gpuctl logs``"""

from __future__ import annotations

from typing import Annotated

import typer

from gpuctl.cli import boot_log
from gpuctl.cli.access import reach
from gpuctl.cli.follow import Follower, Printer, tell_end
from gpuctl.cli.options import Bucket, Cluster, Output, parse_flag, text_option, wants_json, whole_number
from gpuctl.cluster import jobs, layout
from gpuctl.cluster.bucket import Bucket as Store
from gpuctl.cluster.errors import BadInput
from gpuctl.cluster.streams import StreamReader


def verb(
    job: Annotated[str | None, typer.Argument(metavar="[JOB]", help="Default: the newest.", show_default=False)] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job ends.")] = False,
    node: Annotated[str | None, text_option("--node", metavar="NAME", about="Only this node.")] = None,
    rank: Annotated[str | None, text_option("--rank", metavar="R", about="Only this global rank.")] = None,
    number: Annotated[str | None, text_option("--round", metavar="N", about="Only this round.")] = None,
    boot: Annotated[
        str | None, text_option("--boot", metavar="NODE", about="Instead: how this machine became a node.")
    ] = None,
    output: Output = "text",
    cluster: Cluster = None,
    bucket: Bucket = None,
) -> None:
    """Show what a job printed, or how a machine booted.

    With -f, Ctrl-C ends the showing and not the job; the exit code is the job's. -o json prints one object per line.
    """
    if boot is not None:
        _refuse_with_boot({"JOB": job, "--follow": follow, "--node": node, "--rank": rank, "--round": number})
        boot_log.show(reach(cluster, bucket).store, boot, as_json=wants_json(output))
        return
    printer = Printer(as_json=wants_json(output), rank=parse_flag("--rank", rank, whole_number(0)))
    only = parse_flag("--round", number, whole_number(0))
    store = reach(cluster, bucket).store
    spec = jobs.find(store, job)
    if not follow:
        _show_all(store, spec.job, printer, only, node)
        return
    now = jobs.rounds(store, spec.job).read().number
    follower = Follower(store, spec, printer, since=max(0, now - 1), number=only, node=node)
    tell_end(spec, follower.to_the_end())


def _refuse_with_boot(others: dict[str, object]) -> None:
    for name, given in others.items():
        if given:
            raise BadInput(f"{name} is about a job, and --boot about a machine", "leave one of them out")


def _show_all(store: Store, job: str, printer: Printer, number: int | None, node: str | None) -> None:
    """Round by round: only one of them is in memory."""
    prefix = layout.logs(job)
    reader = StreamReader(store, prefix)
    rounds = {int(entry.key.removeprefix(f"{prefix}/").split("/")[0]) for entry in store.list(prefix)}
    for one in sorted(rounds if number is None else rounds & {number}):
        printer.show(reader.read(number=one, node=node))
