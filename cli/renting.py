"""Rented machines on the command line: the plan, the question, and what is seen while a cloud does it."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from gpuctl.cli.my_address import STANDS_FOR_IT, my_network
from gpuctl.cli.options import parse_flag
from gpuctl.cli.plan import MachineFlags, as_json, backend_of, last_of, request_of, show
from gpuctl.cli.settings import Settings
from gpuctl.cli.terminal import confirm, count, out_json, say, styled
from gpuctl.cluster.errors import BadInput, GpuctlError
from gpuctl.stacks.last_up import LastUp, NodeTerms
from gpuctl.stacks.machines import CloudName
from gpuctl.stacks.request import StackRequest

if TYPE_CHECKING:
    from gpuctl.stacks.engine import Progress
    from gpuctl.stacks.known import KnownCluster
    from gpuctl.stacks.rented import Rented

WAIT_MINUTES = 10.0


@dataclass(frozen=True, slots=True)
class TermFlags:
    """Those of ``gpuctl up`` that say how to go about it, as they were typed."""

    wait: str | None = None
    idle_minutes: str | None = None
    stall_minutes: str | None = None
    yes: bool = False
    force: bool = False
    dry_run: bool = False
    as_json: bool = False

    def of_nodes(self, slots: int | None, last: LastUp | None = None) -> NodeTerms:
        """What is not said is as it was. Raises ``BadInput``."""
        told = {
            "slots": slots,
            "idle_minutes": parse_flag("--idle-minutes", self.idle_minutes, minutes),
            "stall_minutes": parse_flag("--stall-minutes", self.stall_minutes, minutes),
        }
        said = {name: value for name, value in told.items() if value is not None}
        return replace(last.terms if last else NodeTerms(), **said)

    def given(self) -> list[str]:
        """Their names, of those that only clouds know."""
        told: dict[str, object] = {
            "--wait": self.wait,
            "--idle-minutes": self.idle_minutes,
            "--yes": self.yes,
            "--force": self.force,
            "--dry-run": self.dry_run,
            "-o json": self.as_json,
        }
        return [name for name, value in told.items() if value]


def minutes(text: str) -> float:
    """Of an option. Raises ``ValueError``."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 100_000:
        raise ValueError("is not a number of minutes; use one such as 15")
    return value


def rent(settings: Settings, provider: CloudName, machines: MachineFlags, flags: TermFlags) -> KnownCluster | None:
    """Plan, ask, make. ``None``: only the plan was wanted."""
    wait = parse_flag("--wait", flags.wait, minutes)
    if flags.as_json and not flags.dry_run:
        raise BadInput("-o json prints the plan", "add --dry-run")
    from gpuctl.stacks import package
    from gpuctl.stacks.rented import told

    last = last_of(settings)
    backend = backend_of(settings, last)
    request = request_of(settings, provider, _from_here(machines, flags), last)
    terms = flags.of_nodes(settings.slots, last)
    unchecked = [f"your public address ({STANDS_FOR_IT} stands for it)"] if flags.dry_run and machines.is_me else []
    _plan(told(request, package.build().package, terms), flags, unchecked)
    if flags.dry_run:
        return None
    from gpuctl.stacks.engine import found_cli

    found_cli()  # before the question: without it, the answer is of no use
    _refuse_what_the_cloud_would(request)
    with renting(backend) as rented:
        wait_s = 60 * (WAIT_MINUTES if wait is None else wait)
        return rented.up(request, terms, wait_s=wait_s, force=flags.force, confirm=lambda: _ask(flags))


@contextmanager
def renting(backend: str = "") -> Iterator[Rented]:
    """With everything that changes in the cloud shown on standard error. ``backend``: see ``engine.Engine``."""
    from gpuctl.stacks.engine import Engine
    from gpuctl.stacks.rented import Rented

    with _shown() as on_progress:
        yield Rented(lambda cluster: Engine(cluster, backend=backend, on_progress=on_progress), say, backend=backend)


def _from_here(machines: MachineFlags, flags: TermFlags) -> MachineFlags:
    """With a network for ``--ssh-from me``. A plan is made offline: another one stands for it there."""
    if not machines.is_me:
        return machines
    network = STANDS_FOR_IT if flags.dry_run else my_network()
    if not flags.dry_run:
        say(f"--ssh-from me: {network}")
    return dataclasses.replace(machines, ssh_from=network)


def _plan(request: StackRequest, flags: TermFlags, unchecked: Sequence[str]) -> None:
    from gpuctl.stacks.planning import plan  # brings Pulumi

    made = plan(request)
    made = replace(made, unchecked=(*made.unchecked, *unchecked))
    if flags.as_json:
        out_json(as_json(made))
    else:
        show(made)
    if made.errors:
        raise BadInput(f"{count(len(made.errors), 'thing')} would stop this", made.errors[0].hint)


def _refuse_what_the_cloud_would(request: StackRequest) -> None:
    """Credentials, rights, quota: all at once, and before anything is there. What it may not be asked is no refusal."""
    from gpuctl.stacks.cloud import cloud
    from gpuctl.stacks.machines import catalog

    there = cloud(request.provider)
    failed = [one for one in there.checks(request, catalog().type(request.type)) if one.status == "fail"]
    for one in failed:
        say(f"error: {one.name}: {one.message}" + (f"; see {one.page}" if one.page else ""))
    if failed:
        raise BadInput(f"{request.provider} would not give these machines", "gpuctl check shows all that was asked")


def _ask(flags: TermFlags) -> None:
    if flags.yes:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise BadInput("this costs money, and there is nobody to ask", "add -y if it is wanted")
    if not confirm("Rent them?", unattended=False):
        raise GpuctlError("nothing was rented", "answer y, or add -y")


# -- progress ---------------------------------------------------------------------------------------------------------


@contextmanager
def _shown() -> Iterator[Callable[[Progress], None]]:
    """A table that lives on a terminal; elsewhere a line for each resource that is done or has failed."""
    if not sys.stderr.isatty():
        yield lambda step: say(_line(step)) if step.state != "running" else None
        return
    from rich.console import Console
    from rich.live import Live

    table = _Table()
    # say() prints above the table: rich takes what goes to standard error while it is live.
    live = Live(console=Console(stderr=True, highlight=False), get_renderable=table.lines, refresh_per_second=4)

    def take(step: Progress) -> None:
        table.take(step)
        live.start()  # only now: before the first step, somebody may have to answer a question

    try:
        yield take
    finally:
        live.stop()


class _Table:
    """What is at work, and how much is done."""

    def __init__(self) -> None:
        self._running: dict[tuple[str, str], tuple[Progress, float]] = {}
        self._done: Counter[str] = Counter()
        self._failed: list[Progress] = []

    def take(self, step: Progress) -> None:
        place = (step.type, step.name)
        if step.state == "running":
            self._running[place] = (step, time.monotonic())
            return
        self._running.pop(place, None)
        if step.state == "done":
            self._done[_past(step.operation)] += 1
        else:
            self._failed.append(step)

    def lines(self) -> Any:
        from rich.text import Text

        now = time.monotonic()
        told = [_line(step) for step in list(self._failed)]
        told += [f"{_line(step)} … {now - since:.0f} s" for step, since in list(self._running.values())]
        if self._done:
            told.append(", ".join(f"{many} {verb}" for verb, many in sorted(self._done.items())))
        return Text.from_ansi("\n".join(told))


_PAST = {
    "create": "created",
    "create-replacement": "created",
    "update": "updated",
    "delete": "deleted",
    "delete-replaced": "deleted",
    "refresh": "read",
    "replace": "replaced",
}


def _past(verb: str) -> str:
    return _PAST.get(verb, verb)


def _line(step: Progress) -> str:
    kind = step.type.rpartition(":")[2]
    if step.state == "failed":
        return styled(f"{step.operation} {kind} {step.name} failed: {step.error}", "red", sys.stderr)
    verb = _past(step.operation) if step.state == "done" else step.operation
    return f"{verb} {kind} {step.name}"
