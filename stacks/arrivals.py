"""From machines asked for to nodes that live: what the group says, what the machines tell of their boot, and who beats.

Two waits in one. Whether a cloud gives machines at all is its affair, and there is another zone; once they run, what
keeps them from being nodes is ours, and the same in every zone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from gpuctl.cluster import layout
from gpuctl.cluster.bucket import Bucket
from gpuctl.cluster.errors import GpuctlError
from gpuctl.cluster.listing import read_each
from gpuctl.cluster.records import BootReport
from gpuctl.cluster.status import read_heartbeats
from gpuctl.stacks.cloud import Cloud, GroupSize
from gpuctl.stacks.provider import Say

_FIRST_LOOK_S = 0.25
_LOOK_S = 3.0
BOOT_S = 20 * 60.0
"""Longest from a machine that runs to a node that lives: a driver and torch take most of it where the image has
neither."""


def pauses_between_looks(longest_s: float) -> Iterator[float]:
    """Seconds, for ever: short at first, as what is waited for may be there already."""
    pause_s = _FIRST_LOOK_S
    while True:
        yield min(pause_s, longest_s)
        pause_s = min(2 * pause_s, longest_s)


class NoCapacity(GpuctlError):
    """The cloud does not give as many machines as are needed at least."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Nodes to wait for. ``capacity_s``: how long the cloud may take to start the machines."""

    fewest: int
    most: int
    capacity_s: float


@dataclass(frozen=True, slots=True)
class Sight:
    """One look at everything."""

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


class Arrivals:
    """Of one cluster's machines, in the zone its stack is in."""

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
        self._lay_there: dict[str, tuple[str, int]] | None = None
        """Heartbeats that were there at the first look, by machine. A machine that Google makes in the place of one
        that was taken has the same name, and nothing has removed what that one wrote last."""

    def wait(self, wanted: Wanted) -> int:
        """Until ``most`` nodes live, or time is up and ``fewest`` do. Returns how many do.

        Raises ``NoCapacity`` with the cloud's reason, and ``GpuctlError`` with the machine's if one cannot boot and too
        few are left, or they take too long.
        """
        began = self._now()
        running_since: float | None = None
        pauses = pauses_between_looks(_LOOK_S)
        while True:
            sight = self.look()
            self._tell(sight)
            waited = self._now() - began
            if len(sight.live) >= wanted.most:
                return len(sight.live)
            if running_since is None and sight.size.running >= wanted.fewest:
                running_since = self._now()
            if running_since is None and waited >= wanted.capacity_s:
                raise NoCapacity(self._why_not(sight, wanted))
            if sight.failed and sight.size.running >= wanted.fewest > sight.hopeful:
                name, reason = next(iter(sight.failed.items()))
                raise GpuctlError(f"{name} could not boot: {reason}", f"see gpuctl logs --boot {name}")
            enough = len(sight.live) >= wanted.fewest
            if enough and (waited >= wanted.capacity_s and len(sight.live) >= sight.hopeful):
                return len(sight.live)
            if running_since is not None and self._now() - running_since >= BOOT_S:
                if enough:
                    return len(sight.live)
                waited_min = f"{BOOT_S / 60:.0f} minutes after the machines began"
                raise GpuctlError(
                    f"{len(sight.live)} of {wanted.fewest} nodes live {waited_min}", "see gpuctl logs --boot NODE"
                )
            self._pause(next(pauses))

    def look(self) -> Sight:
        size = self._there.size(self._outputs)
        records = [beat.record for beat in read_heartbeats(self._bucket)]
        beats = {one.node: (one.incarnation, one.beat) for one in records if one.beat > 0}
        if self._lay_there is None:
            self._lay_there = beats
        found = read_each(self._bucket, [layout.boot_report(name) for name in size.names], BootReport)
        reports = {report.node: report for report in found.values()}
        live = frozenset(name for name in size.names if beats.get(name) != self._lay_there.get(name))
        return Sight(
            size=size,
            live=live,
            booting={name: one.step for name, one in reports.items() if one.state == "booting" and name not in live},
            failed={name: f"{one.step}: {one.reason}" for name, one in reports.items() if one.state == "failed"},
        )

    def _why_not(self, sight: Sight, wanted: Wanted) -> str:
        problems = self._there.problems(self._outputs)
        why = problems[0] if problems else "the cloud does not say why"
        waited = f"{wanted.capacity_s / 60:g} minutes"
        return f"{sight.size.running} of {wanted.fewest} machines came within {waited}: {why}"

    def _tell(self, sight: Sight) -> None:
        """Each thing once."""
        self._once(f"{sight.size.running} of {sight.size.desired} machines run")
        for name, step in sight.booting.items():
            self._once(f"{name}: {step or 'booting'}")
        for name in sorted(sight.live):
            self._once(f"{name} is live")
        for name, reason in sight.failed.items():
            self._once(f"{name} could not boot: {reason}")

    def _once(self, line: str) -> None:
        if line not in self._told:
            self._told.add(line)
            self._say(line)
