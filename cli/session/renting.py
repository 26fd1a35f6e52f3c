"""Rented machines on the command line: from flags to the plan, the question and the cluster."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from gpuctl.cli.render.plan import as_json, show, show_changes
from gpuctl.cli.render.terminal import count, out_json, say
from gpuctl.cli.session.public_ip import STANDS_FOR_IT, my_network
from gpuctl.cli.session.pulumi_consent import install_what_is_missing
from gpuctl.cli.session.rental_plan import MachineFlags, backend_of, last_of, request_of
from gpuctl.cli.settings.options import parse_flag
from gpuctl.cli.settings.resolve import Settings
from gpuctl.cli.signals import as_interrupts
from gpuctl.cluster.errors import BadInput, StoreError
from gpuctl.cluster.storage.bucket import open_bucket
from gpuctl.cluster.storage.error_mapping import shown, to_reopen
from gpuctl.cluster.views import job_status
from gpuctl.stacks.clouds.interface import cloud
from gpuctl.stacks.providers.interface import RentRequest, RentsMachines
from gpuctl.stacks.providers.ownership import me, place
from gpuctl.stacks.request.last_request import LastRequest, NodeOptions
from gpuctl.stacks.request.stack_request import StackRequest, new_cluster_id
from gpuctl.stacks.ssh import keys
from gpuctl.stacks.state import clusters
from gpuctl.stacks.state.clusters import command

if TYPE_CHECKING:
    from gpuctl.stacks.state.clusters import KnownCluster

WAIT_MINUTES = 10.0


@dataclass(frozen=True, slots=True)
class TermFlags:
    """The flags of ``gpuctl up`` that say how to proceed, as they were typed."""

    wait: str | None = None
    idle_minutes: str | None = None
    stall_minutes: str | None = None
    hold_ill_minutes: str | None = None
    skip_check: str | None = None
    yes: bool = False
    force: bool = False
    dry_run: bool = False
    as_json: bool = False

    def of_nodes(self, slots: int | None, last: LastRequest | None = None) -> NodeOptions:
        """The options of the nodes; what is not said is as it was. Raises ``BadInput``."""
        told = {
            "slots": slots,
            "idle_minutes": parse_flag("--idle-minutes", self.idle_minutes, minutes),
            "hold_ill_minutes": parse_flag("--hold-ill", self.hold_ill_minutes, duration),
            "stall_minutes": parse_flag("--stall-minutes", self.stall_minutes, minutes),
        }
        said = {name: value for name, value in told.items() if value is not None}
        return replace(last.terms if last else NodeOptions(), **said)

    def given(self) -> list[str]:
        """Their names, of those that only clouds know."""
        told: dict[str, object] = {
            "--wait": self.wait,
            "--idle-minutes": self.idle_minutes,
            "--hold-ill": self.hold_ill_minutes,
            "--yes": self.yes,
            "--force": self.force,
            "--skip-check": self.skip_check,
            "--dry-run": self.dry_run,
            "-o json": self.as_json,
        }
        return [name for name, value in told.items() if value]


def minutes(text: str) -> float:
    """Parse a number of minutes. Raises ``ValueError``."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 100_000:
        raise ValueError("is not a number of minutes; use one such as 15")
    return value


def duration(text: str) -> float:
    """Parse a time such as ``1h`` into minutes. Raises ``ValueError``."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([mh])|0", text.strip(), re.ASCII)
    if not found:
        raise ValueError("is not a time; use one such as 30m or 1h, or 0")
    return float(found[1] or 0) * (60 if found[2] == "h" else 1)


def rent(there: RentsMachines, settings: Settings, machines: MachineFlags, flags: TermFlags) -> KnownCluster | None:
    """Plan, ask and rent; returns ``None`` where only the plan was wanted.

    Args:
        there: the cloud's provider, which rents.
        settings: of the verb, with the cluster's name.
        machines: flags that choose the machines.
        flags: say how to proceed, such as without a question.
    """
    provider = cloud(there.name).name
    wait = parse_flag("--wait", flags.wait, minutes)
    if flags.as_json and not flags.dry_run:
        raise BadInput("-o json prints the plan", "add --dry-run")
    from gpuctl.stacks.clouds.extras import require_pulumi
    from gpuctl.stacks.providers import node_package
    from gpuctl.stacks.rented.clusters import with_user_data

    require_pulumi(provider)

    last = last_of(settings)
    backend = backend_of(settings, last)
    request = request_of(settings, provider, _from_here(machines, flags), last)
    if last is None:
        known = clusters.get(settings.cluster)  # of one that was attached: it goes on at its bucket
        bucket = request.bucket or (known.bucket if known and known.provider == provider else "")
        request = replace(request, id=new_cluster_id(), owner=me(), bucket=bucket)
    unchecked = [f"your public address ({STANDS_FOR_IT} stands for it)"] if flags.dry_run and machines.is_me else []
    if not request.ssh_key and (request.ssh_from or provider == "azure"):
        is_made = not flags.dry_run or keys.own().is_file()
        unchecked += [] if is_made else [f"your SSH key (`up` makes one, {keys.own()})"]
        request = replace(request, ssh_key=keys.make() if is_made else keys.STANDS_FOR_IT)
    terms = replace(flags.of_nodes(settings.slots, last), zones=request.zones)
    if machines.ssh_key or last is None or request.ssh_key != last.request.ssh_key:
        path = Path(machines.ssh_key) if machines.ssh_key else None
        terms = replace(terms, identity=keys.identity(request.ssh_key, path))
    planned = with_user_data(request, node_package.build().package, terms)
    _plan(planned, flags, unchecked, changes_since(last, request, terms))
    if flags.dry_run:
        return None
    install_what_is_missing(provider, yes=flags.yes)  # before the question: without it, the answer is of no use
    _refuse_to_leave_jobs(last, request)
    refuse_failed_checks(request, flags.skip_check or "")
    wait_s = 60 * (WAIT_MINUTES if wait is None else wait)
    rental = RentRequest(request, terms, backend, wait_s, flags.force)
    with as_interrupts():
        return there.rent(rental)


def _from_here(machines: MachineFlags, flags: TermFlags) -> MachineFlags:
    """Replace ``--ssh-from me`` by this machine's network. A plan is made offline: another one stands for it there."""
    if not machines.is_me:
        return machines
    network = STANDS_FOR_IT if flags.dry_run else my_network()
    if not flags.dry_run:
        say(f"--ssh-from me: {network}")
    return dataclasses.replace(machines, ssh_from=network)


def _plan(request: StackRequest, flags: TermFlags, unchecked: Sequence[str], changes: Sequence[str] | None) -> None:
    """All of it the first time and with ``--dry-run``, after that what ``changes``. Raises ``BadInput`` if something
    speaks against it."""
    from gpuctl.stacks.plan.planner import plan  # brings Pulumi

    made = plan(request)
    made = replace(made, unchecked=(*made.unchecked, *unchecked))
    if flags.as_json:
        out_json(as_json(made))
    elif changes is None or flags.dry_run:
        show(made)
    else:
        show_changes(made, changes)
    if made.errors:
        hint = made.errors[0].hint if flags.as_json else "see above"
        raise BadInput(f"{count(len(made.errors), 'problem')} to fix first", hint)


def changes_since(last: LastRequest | None, request: StackRequest, terms: NodeOptions) -> list[str] | None:
    """A line each, as ``nodes: 2 -> 4``, for what ``up`` changes in a cluster; ``None``: there was nothing before."""
    if last is None:
        return None
    before, after = last.request, request
    pairs = {
        "nodes": (_nodes(before), _nodes(after)),
        "type": (before.type, after.type),
        "region": (before.region, after.region),
        "zone": (", ".join(before.zones), ", ".join(after.zones or before.zones)),
        "price": (_kind(before), _kind(after)),
        "placement": (str(before.placement), str(after.placement)),
        "bucket": (to_reopen(before.bucket_url()), to_reopen(after.bucket_url())),
        "ssh from": (before.ssh_from or "nobody", after.ssh_from or "nobody"),
        "ssh key": (before.ssh_key, after.ssh_key),
        "disk": (f"{before.disk_gb} GB", f"{after.disk_gb} GB"),
        "image": (before.image or "the cloud's", after.image or "the cloud's"),
        "slots": (str(last.terms.slots), str(terms.slots)),
        "idle minutes": (f"{last.terms.idle_minutes:g}", f"{terms.idle_minutes:g}"),
        "hold ill": (f"{last.terms.hold_ill_minutes:g} minutes", f"{terms.hold_ill_minutes:g} minutes"),
        "stall minutes": (f"{last.terms.stall_minutes:g}", f"{terms.stall_minutes:g}"),
        "gpuctl": (before.version, after.version),
    }
    goes_on = f"goes on with what an earlier `{command('up', request.cluster)}` began"
    told = [] if last.is_done else [goes_on]
    return told + [f"{what}: {old} -> {new}" for what, (old, new) in pairs.items() if old != new]


def _nodes(request: StackRequest) -> str:
    fewest, most = request.nodes_min, request.nodes_max
    return str(most) if fewest == most else f"{fewest}:{most}"


def _kind(request: StackRequest) -> str:
    return "spot" if request.spot else "on demand"


def _refuse_to_leave_jobs(last: LastRequest | None, request: StackRequest) -> None:
    """Raises ``BadInput`` if the cluster is to be at another bucket while jobs wait at the one before."""
    if last is None or place(last.request.bucket_url()) == place(request.bucket_url()):
        return
    url = last.request.bucket_url()
    try:
        waiting = job_status.unfinished(open_bucket(url))
    except StoreError:  # it never came to be, or is gone
        return
    if waiting:
        raise BadInput(
            f"{', '.join(waiting)} at {shown(url)} would be out of reach",
            "leave --bucket out, or cancel what is there first (gpuctl cancel)",
        )


def refuse_failed_checks(request: StackRequest, skipped: str) -> None:
    """Credentials, rights, quota: all at once, and before anything is there. What it may not be asked is no refusal.

    Args:
        request: what the cloud is to be asked for.
        skipped: names of checks with commas between them, whose failure the user knows better than: rights under a
            condition, for example, cannot be told before they are used.
    """
    from gpuctl.stacks.catalog.instance_types import catalog

    there = cloud(request.provider)
    found = there.checks(request, catalog().type(request.type))
    names = [name.strip() for name in skipped.split(",") if name.strip()]
    if unknown := [name for name in names if name not in [one.name for one in found]]:
        known = ", ".join(one.name for one in found)
        raise BadInput(f"--skip-check {unknown[0]}: there is no such check", f"there are: {known}")
    failed = [one for one in found if one.status == "fail"]
    for one in failed:
        grade = "warning" if one.name in names else "error"
        say(f"{grade}: {one.name}: {one.message}" + (f"; see {one.page}" if one.page else ""))
    if left := [one.name for one in failed if one.name not in names]:
        hint = f"`gpuctl check` shows all checks; --skip-check {shlex.quote(','.join(left))} goes on without"
        raise BadInput(f"{request.provider} would refuse these machines", hint)
