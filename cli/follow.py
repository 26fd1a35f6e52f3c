"""Showing a job as it goes: what its workers print, with a ``node/rank`` prefix, and what happens to it between."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from gpuctl.cli.terminal import count, event, is_colourful, out, say
from gpuctl.cluster import jobs, layout, status
from gpuctl.cluster.bucket import Bucket
from gpuctl.cluster.errors import StoreUnavailable
from gpuctl.cluster.records import JobSpec, Outcome, Round
from gpuctl.cluster.streams import StreamReader

_PATIENCE_S = 300.0
"""Without an answer from the bucket."""
_QUIET_S = 15.0
"""Without news of the job before it is asked whether anybody lives."""
_LINED_UP_S = 2.0
_LIST_EVERY = 30
"""Looks at the rounds between two that list them."""
_COLOURS = (36, 33, 35, 32, 34, 96, 93, 95)

Found = tuple[int, str, dict[str, Any]]
"""(round, node, line), as ``StreamReader`` reads it."""


@dataclass(slots=True)
class Printer:
    """Prints lines of logs, as text or as one JSON object each."""

    as_json: bool = False
    rank: int | None = None
    """Only this global rank."""
    _width: int = 0

    def show(self, found: Iterable[Found]) -> None:
        """In order of time; nodes' clocks are near enough."""
        ordered = sorted(found, key=lambda item: (item[0], item[2].get("t", 0.0)))
        for number, node, line in ordered:
            if self.rank is None or line.get("rank") == self.rank:
                out(self._as_json(number, node, line) if self.as_json else self._as_text(node, line))
        if ordered:
            sys.stdout.flush()

    def _as_json(self, number: int, node: str, line: dict[str, Any]) -> str:
        return msgspec.json.encode({"round": number, "node": node, **line}).decode()

    def _as_text(self, node: str, line: dict[str, Any]) -> str:
        rank = line.get("rank", 0)
        prefix = f"{node}/{rank}"
        self._width = max(self._width, len(prefix))
        prefix = prefix.ljust(self._width)
        if is_colourful(sys.stdout):
            prefix = f"\033[{_COLOURS[rank % len(_COLOURS)]}m{prefix}\033[0m"
        # Of a progress bar that redraws itself only the last state counts.
        text = str(line.get("text", "")).rstrip("\r\n").rpartition("\r")[2]
        return f"{prefix} | {text}"


class Follower:
    """Follows one job to its end. ``since``: the version of its rounds from which on events are told."""

    def __init__(
        self,
        store: Bucket,
        spec: JobSpec,
        printer: Printer,
        *,
        since: int = 0,
        number: int | None = None,
        node: str | None = None,
    ) -> None:
        self._store = store
        self._spec = spec
        self._printer = printer
        self._number = number
        self._node = node
        self._reader = StreamReader(store, layout.logs(spec.job))
        self._rounds = jobs.rounds(store, spec.job)
        self._version = since
        self._current: Round | None = None
        self._looks = 0
        self._news_at = time.monotonic()
        self._told: set[str] = set()

    def to_the_end(self) -> Outcome:
        """Print until the job has ended and all it printed is out.

        Raises ``StoreUnavailable`` once the bucket has not answered for five minutes.
        """
        failing_since: float | None = None
        while True:
            try:
                ended = self._look()
                failing_since = None
                if ended:
                    return ended
                self._explain_silence()
            except StoreUnavailable as error:
                failing_since = failing_since or time.monotonic()
                if time.monotonic() - failing_since > _PATIENCE_S:
                    raise
                self._tell("bucket", f"trying again: {error.message}")
            time.sleep(jobs.poll_s(self._store))

    def _look(self) -> Outcome | None:
        before = self._current
        rounds = self._new_rounds()
        # An agent ships the last lines before it reports how its workers ended, so whoever has seen the end of the
        # job before reading sees them all.
        found = list(self._reader.read(number=self._number, node=self._node))
        if rounds or found:
            self._news_at = time.monotonic()
            self._told.clear()
        for current in rounds:
            self._printer.show(item for item in found if item[0] < current.number)
            found = [item for item in found if item[0] >= current.number]
            if _is_news(current, before):
                event(_of_round(current))
            before = current
        self._printer.show(found)
        if self._current is None or self._current.phase != "ended":
            return None
        return self._current.outcome or Outcome(result="failed", exit_code=1, message="ended without a word")

    def _new_rounds(self) -> list[Round]:
        """What was decided since the last look. Listing now and then finds it after a sleep past a pruning, too."""
        self._looks += 1
        watching = self._current is not None and self._looks % _LIST_EVERY
        if watching and self._rounds.newer(self._version) is None:
            return []
        versions = self._rounds.since(self._version)
        if versions:
            self._version, self._current = versions[-1].number, versions[-1].value
        return [version.value for version in versions if version.value is not None]

    def _explain_silence(self) -> None:
        quiet_s = time.monotonic() - self._news_at
        if self._spec.image and quiet_s > _LINED_UP_S:
            self._tell_of_pulls()
        if (self._current is None or self._current.number == 0) and quiet_s > _LINED_UP_S and "line" not in self._told:
            ahead = [job for job in status.unfinished(self._store) if job != self._spec.job]
            why = f"behind {', '.join(ahead)}" if ahead else f"for {count(self._spec.nodes_min, 'node')}"
            self._tell("line", f"{self._spec.job} waits {why}")
        if quiet_s > _QUIET_S and "quiet" not in self._told:
            seen_at = max((beat.seen_at for beat in status.read_heartbeats(self._store)), default=0.0)
            if time.time() - seen_at > _QUIET_S:
                self._tell("quiet", "no node has been heard of for a while; the job goes on when one is back")

    def _tell_of_pulls(self) -> None:
        records = [beat.record for beat in status.read_heartbeats(self._store)]
        for doing in sorted({record.doing for record in records if record.doing}):
            self._tell(doing, f"{doing} on {', '.join(record.node for record in records if record.doing == doing)}")

    def _tell(self, what: str, line: str) -> None:
        """Once, until there is news."""
        if what not in self._told:
            self._told.add(what)
            event(line)


def tell_end(spec: JobSpec, outcome: Outcome) -> None:
    """The last words about a job. Raises ``JobFailed`` unless it went well."""
    if outcome.result == "succeeded":
        say(f"job {spec.job} succeeded")
        return
    if outcome.traceback:
        say(outcome.traceback.rstrip())
    raise jobs.JobFailed(spec.job, outcome)


def _is_news(current: Round, before: Round | None) -> bool:
    """Not its time in line, not its end (``tell_end``), and not an entry that a new rank 0 wrote again as its own."""
    again = before is not None and (before.number, before.phase) == (current.number, current.phase)
    return current.number > 0 and current.phase != "ended" and not again


def _of_round(current: Round) -> str:
    head = f"round {current.number}: {current.reason}"
    if current.phase == "run":
        return f"{head}, {count(len(current.members), 'node')}"
    if current.phase == "drain":
        return f"{head}, workers have {current.drain_s:.0f} s for a last checkpoint"
    return head
