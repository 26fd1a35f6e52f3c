"""Showing a job as it goes: what its workers print, what happens to it between, and on a terminal how far it is."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable

from gpuctl.cli.render.job.log_lines import Printer
from gpuctl.cli.render.job.progress_line import ProgressLine
from gpuctl.cli.render.terminal import count, event, say
from gpuctl.cluster import layout
from gpuctl.cluster.agreement import ledgers
from gpuctl.cluster.disk import full_bucket
from gpuctl.cluster.errors import StoreUnavailable
from gpuctl.cluster.jobs import queue
from gpuctl.cluster.records.jobs import JobSpec
from gpuctl.cluster.records.rounds import JobOutcome, Round
from gpuctl.cluster.storage.bucket import Bucket
from gpuctl.cluster.storage.streams import StreamReader
from gpuctl.cluster.views import job_status

_PATIENCE_S = 300.0
"""Without an answer from the bucket."""
_QUIET_S = 15.0
"""Without news of the job before it is asked whether anybody lives."""
_LINED_UP_S = 2.0
_LIST_EVERY = 30
"""Looks at the rounds between two that list them."""
_BACK = "the job goes on when one is back"


class Follower:
    """Follows one job to its end.

    Args:
        store: the cluster's bucket.
        spec: the job.
        printer: shows the lines that the workers print.
        since: the version of the job's rounds after which events are told.
        number: show only this round's lines; ``None``: those of all rounds.
        node: show only this node's lines; ``None``: those of all nodes.
        why_silent: what is known of nodes that are not heard of, and what to do; empty: nothing.
    """

    def __init__(
        self,
        store: Bucket,
        spec: JobSpec,
        printer: Printer,
        *,
        since: int = 0,
        number: int | None = None,
        node: str | None = None,
        why_silent: Callable[[], str] = str,
    ) -> None:
        self._store = store
        self._why_silent = why_silent
        self._spec = spec
        self._printer = printer
        self._number = number
        self._node = node
        self._reader = StreamReader(store, layout.logs(spec.job))
        self._rounds = ledgers.rounds(store, spec.job)
        self._progress = ProgressLine(store, spec.job)
        self._version = since
        self._current: Round | None = None
        self._looks = 0
        self._news_at = time.monotonic()
        self._told: set[str] = set()

    def to_the_end(self, limit_s: float | None = None) -> JobOutcome:
        """Print until the job has ended and all it printed is out.

        Raises ``StoreUnavailable`` once the bucket has not answered for five minutes, and ``TimeoutError`` if the job
        has not ended after ``limit_s`` seconds.
        """
        try:
            return self._follow(limit_s)
        finally:
            self._printer.clear()

    def _follow(self, limit_s: float | None) -> JobOutcome:
        failing_since: float | None = None
        began = time.monotonic()
        while True:
            try:
                ended = self._look()
                failing_since = None
                if ended:
                    return ended
                if limit_s is not None and time.monotonic() - began > limit_s:
                    raise TimeoutError
                self._explain_silence()
                if self._printer.has_status:
                    self._printer.status(self._progress.text(self._current, shutil.get_terminal_size().columns - 1))
            except StoreUnavailable as error:
                failing_since = failing_since or time.monotonic()
                if time.monotonic() - failing_since > _PATIENCE_S:
                    raise
                self._tell("bucket", f"trying again: {error.message}")
            time.sleep(queue.poll_s(self._store))

    def _look(self) -> JobOutcome | None:
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
                self._printer.clear()
                event(_of_round(current))
                if current.phase == "run":
                    self._tell_what_is_not_shown(current)
            before = current
        self._printer.show(found)
        if self._current is None or self._current.phase != "ended":
            return None
        self._printer.finish()
        return queue.outcome_of_last(self._current)

    def _new_rounds(self) -> list[Round]:
        """The rounds that were decided since the last look. Listing now and then finds them after a sleep past a
        pruning, too."""
        self._looks += 1
        watching = self._current is not None and self._looks % _LIST_EVERY
        if watching and self._rounds.newer(self._version) is None:
            return []
        versions = self._rounds.since(self._version)
        if versions:
            self._version, self._current = versions[-1].number, versions[-1].value
        return [version.value for version in versions if version.value is not None]

    def _tell_what_is_not_shown(self, current: Round) -> None:
        """The node or rank that is asked for has no part in this round, though it may have in the next."""
        ranks = sum(member.nproc for member in current.members)
        nodes = [member.node for member in current.members]
        if self._printer.rank is not None and self._printer.rank >= ranks:
            event(f"round {current.number} has no rank {self._printer.rank}; there are: {ranks}, from 0")
        if self._node is not None and self._node not in nodes:
            event(f"round {current.number} has no node {self._node}; there are: {', '.join(nodes)}")

    def _explain_silence(self) -> None:
        quiet_s = time.monotonic() - self._news_at
        if (self._spec.image or self._spec.environment) and quiet_s > _LINED_UP_S:
            self._tell_what_nodes_do()
        if (self._current is None or self._current.number == 0) and quiet_s > _LINED_UP_S and "line" not in self._told:
            ahead = [job for job in job_status.unfinished(self._store) if job != self._spec.job]
            why = f"behind {', '.join(ahead)}" if ahead else f"for {count(self._spec.nodes_min, 'node')}"
            self._tell("line", f"{self._spec.job} waits {why}")
        if quiet_s > _QUIET_S and "quiet" not in self._told:
            beats = job_status.read_heartbeats(self._store)
            for record in (beat.record for beat in beats if beat.record.trouble):
                self._tell(record.node, f"{record.node}: {record.trouble}")
            if time.time() - max((beat.seen_at for beat in beats), default=0.0) > _QUIET_S:
                full = full_bucket(self._store)
                why = f": {full}; free some space, and the job goes on" if full else f"; {self._why_silent() or _BACK}"
                self._tell("quiet", f"no node has reported for a while{why}")

    def _tell_what_nodes_do(self) -> None:
        records = [beat.record for beat in job_status.read_heartbeats(self._store)]
        for doing in sorted({record.doing for record in records if record.doing}):
            self._tell(doing, f"{doing} on {', '.join(record.node for record in records if record.doing == doing)}")

    def _tell(self, what: str, line: str) -> None:
        """Print a line once, until there is news."""
        if what not in self._told:
            self._told.add(what)
            self._printer.clear()
            event(line)


def tell_end(spec: JobSpec, outcome: JobOutcome) -> None:
    """The last words about a job. Raises ``JobFailed`` unless it went well."""
    if outcome.result == "succeeded":
        say(f"job {spec.job} succeeded")
        return
    if outcome.traceback:
        say(outcome.traceback.rstrip())
    raise queue.JobFailed(spec.job, outcome)


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
