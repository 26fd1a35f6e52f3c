"""The way from machines asked for to nodes that live: what the group says, what the machines tell of their boot, and
who beats.

Two waits in one. Whether a cloud gives machines at all is its affair, and there is another zone; once they run, what
keeps them from being nodes is ours, and the same in every zone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from gpuctl.cluster import layout
from gpuctl.cluster.errors import GpuctlError
from gpuctl.cluster.records.nodes import BootReport
from gpuctl.cluster.storage.bucket import Bucket
from gpuctl.cluster.storage.record_io import read_each
from gpuctl.cluster.views.job_status import read_heartbeats
from gpuctl.stacks.clouds.answers import GroupSize, LaunchProblem
from gpuctl.stacks.clouds.interface import Cloud
from gpuctl.stacks.providers.interface import Say

_FIRST_LOOK_S = 0.25
_LOOK_S = 3.0
_ASK_WHY_S = 15.0
"""Between questions for the cloud's reasons, which some clouds answer from a log with a quota of its own."""
BOOT_S = 30 * 60.0
"""Longest from a machine that runs to a node that lives: torch, and a driver that is built there where the image has
none, take most of it."""


def pauses_between_looks(longest_s: float) -> Iterator[float]:
    """Seconds, for ever: short at first, as what is waited for may be there already."""
    pause_s = _FIRST_LOOK_S
    while True:
        yield min(pause_s, longest_s)
        pause_s = min(2 * pause_s, longest_s)


class NoCapacity(GpuctlError):
    """The cloud gives fewer machines than the minimum."""


class CapacityRefused(NoCapacity):
    """The cloud will not give them in another zone either."""


@dataclass(frozen=True, slots=True)
class FleetRequest:
    """The nodes to wait for. ``capacity_s``: how long the cloud may take to start the machines."""

    fewest: int
    most: int
    capacity_s: float


@dataclass(frozen=True, slots=True)
class FleetState:
    """The state of a cluster's machines at one moment."""

    size: GroupSize
    live: frozenset[str]
    booting: Mapping[str, str]
    """Step by machine."""
    failed: Mapping[str, str]
    """Why, by machine."""

    @property
    def hopeful(self) -> int:
        """Machines that are nodes, or may come to be."""
        return len([name for name in self.size.names if name not in self.failed])


class FleetWatch:
    """Waits for one cluster's machines, in the zone its stack is in. Made before they are asked for: what the cloud
    complains of by then is of an earlier try.

    Args:
        there: the cloud.
        outputs: the stack's (see ``Cloud.program``).
        bucket: the cluster's, with heartbeats and reports of boots.
        say: is told each line of progress once.
        now: a clock in seconds.
        pause: sleeps for so many seconds between two looks.
    """

    def __init__(
        self,
        there: Cloud,
        outputs: Mapping[str, object],
        bucket: Bucket,
        say: Say,
        *,
        now: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._there = there
        self._outputs = outputs
        self._bucket = bucket
        self._say = say
        self._now = now
        self._pause = pause
        self._told: set[str] = set()
        self._asked_why_at = 0.0
        self._old_problems = frozenset(there.problems(outputs))
        self._lay_there: dict[str, tuple[str, int]] | None = None
        """Heartbeats that were there at the first look, by machine. A machine that Google makes in the place of one
        that was taken has the same name, and nothing has removed what that one wrote last."""

    def wait(self, wanted: FleetRequest) -> int:
        """Wait until ``most`` nodes live, or time is up and ``fewest`` do. Returns how many do.

        Raises ``NoCapacity`` with the cloud's reason, at once where waiting is of no use in this zone; ``GpuctlError``
        where it is of no use in any, and with the machine's reason if one cannot boot and too few are left, or they
        take too long.
        """
        began = self._now()
        running_since: float | None = None
        pauses = pauses_between_looks(_LOOK_S)
        while True:
            fleet = self.look()
            self._tell(fleet)
            waited = self._now() - began
            if len(fleet.live) >= wanted.most:
                return len(fleet.live)
            if running_since is None and fleet.size.running >= wanted.fewest:
                running_since = self._now()
            if running_since is None:
                self._look_at_problems(fleet, waited)
            if running_since is None and waited >= wanted.capacity_s:
                raise NoCapacity(self._why_not(fleet, wanted))
            if fleet.failed and fleet.size.running >= wanted.fewest > fleet.hopeful:
                name, reason = next(iter(fleet.failed.items()))
                raise GpuctlError(f"{name} could not boot: {reason}", f"see gpuctl logs --boot {name}")
            enough = len(fleet.live) >= wanted.fewest
            if enough and (waited >= wanted.capacity_s and len(fleet.live) >= fleet.hopeful):
                return len(fleet.live)
            if running_since is not None and self._now() - running_since >= BOOT_S:
                if enough:
                    return len(fleet.live)
                waited_min = f"{BOOT_S / 60:.0f} minutes after the machines started"
                raise GpuctlError(
                    f"{len(fleet.live)} of {wanted.fewest} nodes live {waited_min}", "see gpuctl logs --boot NODE"
                )
            self._pause(next(pauses))

    def look(self) -> FleetState:
        size = self._there.size(self._outputs)
        records = [beat.record for beat in read_heartbeats(self._bucket)]
        beats = {one.node: (one.incarnation, one.beat) for one in records if one.beat > 0}
        if self._lay_there is None:
            self._lay_there = beats
        found = read_each(self._bucket, [layout.boot_report(name) for name in size.names], BootReport)
        reports = {report.node: report for report in found.values()}
        live = frozenset(name for name in size.names if beats.get(name) != self._lay_there.get(name))
        return FleetState(
            size=size,
            live=live,
            booting={name: one.step for name, one in reports.items() if one.state == "booting" and name not in live},
            failed={name: f"{one.step}: {one.reason}" for name, one in reports.items() if one.state == "failed"},
        )

    def _look_at_problems(self, fleet: FleetState, waited: float) -> None:
        """Handle launch problems as soon as the cloud reports them, and not at the timeout."""
        if waited - self._asked_why_at < _ASK_WHY_S:
            return
        self._asked_why_at = waited
        problems = self._new_problems()
        for problem in reversed(problems):
            self._once(f"no machine yet: {problem.message}")
        came = f"{fleet.size.running} of {fleet.size.desired} machines started"
        for problem in problems:
            if problem.verdict == "stop":
                raise CapacityRefused(f"{came}, and no more will start: {problem.message}", "fix that, then repeat it")
            if problem.verdict == "next zone":
                raise NoCapacity(f"{came}, and no more will start: {problem.message}")

    def _new_problems(self) -> Sequence[LaunchProblem]:
        return [one for one in self._there.problems(self._outputs) if one not in self._old_problems]

    def _why_not(self, fleet: FleetState, wanted: FleetRequest) -> str:
        problems = self._new_problems()
        why = problems[0].message if problems else "the cloud gives no reason"
        waited = f"{wanted.capacity_s / 60:g} minutes"
        return f"{fleet.size.running} of {wanted.fewest} machines started within {waited}: {why}"

    def _tell(self, fleet: FleetState) -> None:
        """Tell what is new since the last look, each message once."""
        self._once(f"{fleet.size.running} of {fleet.size.desired} machines run")
        for name, step in fleet.booting.items():
            self._once(f"{name}: {step or 'booting'}")
        for name in sorted(fleet.live):
            self._once(f"{name} is live")
        for name, reason in fleet.failed.items():
            self._once(f"{name} could not boot: {reason}")

    def _once(self, line: str) -> None:
        if line not in self._told:
            self._told.add(line)
            self._say(line)
