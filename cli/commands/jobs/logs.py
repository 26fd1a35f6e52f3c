"""``gpuctl logs``: the output of a job, or the boot log of a machine."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from gpuctl.cli.render import boot_log
from gpuctl.cli.render.job.follow import Follower, tell_end
from gpuctl.cli.render.job.log_lines import Printer
from gpuctl.cli.session.open_cluster import reach
from gpuctl.cli.settings.options import Bucket, Cluster, Output, parse_flag, text_option, wants_json, whole_number
from gpuctl.cluster import layout
from gpuctl.cluster.agreement import ledgers
from gpuctl.cluster.errors import BadInput
from gpuctl.cluster.jobs import queue
from gpuctl.cluster.storage.bucket import Bucket as Store
from gpuctl.cluster.storage.streams import StreamReader

_NAMED = 20
"""Of a list, in a line."""


def verb(
    job: Annotated[
        str | None, typer.Argument(metavar="[JOB]", help="Job id (default: the newest).", show_default=False)
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow until the job ends.")] = False,
    node: Annotated[str | None, text_option("--node", metavar="NAME", about="Only this node.")] = None,
    rank: Annotated[str | None, text_option("--rank", metavar="R", about="Only this global rank.")] = None,
    number: Annotated[str | None, text_option("--round", metavar="N", about="Only this round.")] = None,
    boot: Annotated[
        str | None, text_option("--boot", metavar="NODE", about="Show this machine's boot log instead.")
    ] = None,
    output: Output = "text",
    cluster: Cluster = None,
    bucket: Bucket = None,
) -> None:
    """Show the output of a job, or the boot log of a machine.

    With -f, Ctrl-C ends the showing and not the job; the exit code is the job's. -o json prints one object per line.
    """
    if boot is not None:
        _refuse_with_boot({"JOB": job, "--follow": follow, "--node": node, "--rank": rank, "--round": number})
        boot_log.show(reach(cluster, bucket).store, boot, as_json=wants_json(output))
        return
    printer = Printer(as_json=wants_json(output), live=follow, rank=parse_flag("--rank", rank, whole_number(0)))
    only = parse_flag("--round", number, whole_number(0))
    access = reach(cluster, bucket)
    store = access.store
    spec = queue.find(store, job)
    if not follow or queue.outcome(store, spec.job):
        _refuse_unknown(store, spec.job, {"--round": only, "--node": node, "--rank": printer.rank})
    if not follow:
        _show_all(store, spec.job, printer, only, node)
        return
    now = ledgers.rounds(store, spec.job).read().number
    why = access.why_ended
    follower = Follower(store, spec, printer, since=max(0, now - 1), number=only, node=node, why_silent=why)
    tell_end(spec, follower.to_the_end())


def _refuse_with_boot(others: dict[str, object]) -> None:
    for name, given in others.items():
        if given:
            raise BadInput(f"{name} is about a job, and --boot about a machine", "leave one of them out")


def _refuse_unknown(store: Store, job: str, asked: dict[str, int | str | None]) -> None:
    """Raises ``BadInput`` with those there are: nothing at all would look like a job that is silent."""
    if all(value is None for value in asked.values()):
        return
    lived = [version.value for version in ledgers.rounds(store, job).history() if version.value]
    printed = [entry.key.removeprefix(f"{layout.logs(job)}/").split("/") for entry in store.list(layout.logs(job))]
    ranks = max((sum(member.nproc for member in round_.members) for round_ in lived), default=0)
    there: dict[str, set[Any]] = {
        "--round": {round_.number for round_ in lived if round_.number} | {int(parts[0]) for parts in printed},
        "--node": {member.node for round_ in lived for member in round_.members} | {parts[1] for parts in printed},
        "--rank": set(range(ranks)) or {asked["--rank"] or 0},
    }
    for flag, value in asked.items():
        if value is not None and value not in there[flag]:
            known = sorted(there[flag], key=lambda one: (len(str(one)), one))
            names = ", ".join(map(str, known[:_NAMED])) + (" …" if len(known) > _NAMED else "")
            what = flag.removeprefix("--")
            raise BadInput(f"job {job} has no {what} {value}", f"there are: {names}" if names else "it has not run yet")


def _show_all(store: Store, job: str, printer: Printer, number: int | None, node: str | None) -> None:
    """Round by round: only one of them is in memory."""
    prefix = layout.logs(job)
    reader = StreamReader(store, prefix)
    rounds = {int(entry.key.removeprefix(f"{prefix}/").split("/")[0]) for entry in store.list(prefix)}
    for one in sorted(rounds if number is None else rounds & {number}):
        printer.show(reader.read(number=one, node=node))
    printer.finish()
