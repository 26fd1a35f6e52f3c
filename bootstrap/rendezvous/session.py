"""From the arrival of a node to the end of its run."""

from __future__ import annotations

import math
from collections.abc import Callable

from gpuctl.bootstrap.rendezvous.participant import Attendee, Begin, Participant
from gpuctl.bootstrap.rendezvous.progress import Progress, missing
from gpuctl.bootstrap.rendezvous.runs import LEASE_S, Run, RunRequest, join
from gpuctl.cluster.clock import Clock
from gpuctl.cluster.errors import BadInput, GpuctlError, StoreError, StoreUnavailable
from gpuctl.cluster.records.rounds import JobOutcome
from gpuctl.cluster.storage.bucket import Bucket

_CLASH_S = 2.5 * LEASE_S
_REFUSED_S = 30.0
"""A bucket that refuses what it took before is tried again for so long before the end of what has run is given up."""
_MARGIN_S = 2.0
"""Of a notice's lead, kept for leaving."""
_TIMED_OUT = 124
"""Exit code, as of timeout(1)."""


class NotAllHere(GpuctlError):
    """The time to wait is over, and not all nodes have come."""

    exit_code = _TIMED_OUT


class Session:
    """A node's stay in the runs of an ID: in one run as a rule, in the next if that one ended before the node was in a
    round of it."""

    def __init__(
        self,
        bucket: Bucket,
        request: RunRequest,
        attendee: Attendee,
        begin: Begin,
        clock: Clock,
        say: Callable[[str], None],
        timeout_s: float | None = None,
        *,
        ends_as_spare: bool = False,
    ) -> None:
        """
        Args:
            timeout_s: how long to wait, without a break, for enough nodes; ``None``: as long as it takes.
            ends_as_spare: with a run that has done its work the nodes end that were not in its last round, too; else
                they are in the next one.
        """
        self._bucket = bucket
        self._request = request
        self._attendee = attendee
        self._begin = begin
        self._clock = clock
        self._say = say
        self._timeout_s = timeout_s
        self._ends_as_spare = ends_as_spare
        self._hurries = False
        self._since: dict[str, float] = {}
        self._failing = ""
        self.node: Participant | None = None
        """This node in the run that it is in."""
        self._notice: tuple[float, str] | None = None

    def stay(self) -> JobOutcome | None:
        """How the run ended; ``None``: the node has left it before, after a notice.

        Raises ``NotAllHere``, ``BadInput`` (the run has another size, or the rank is taken), ``StoreError``.
        """
        while True:
            run = self._joined()
            if run is None:
                return None
            node = Participant(run, self._attendee, self._begin, self._clock, self._say)
            self.node = node
            if self._notice:
                node.take_notice(*self._notice)
            try:
                ended = self._attend(node, Progress(run, self._say))
            finally:
                node.leave(told=not self._failing and not self._hurries)
            if ended is None or ended.result == "failed" or node.was_in_a_round:
                return ended
            if self._ends_as_spare and ended.result == "succeeded":
                self._say(f"{run.name} has ended; this was a spare")
                return ended
            self._say(f"{run.name} ended as this node came; this is the next run")

    def take_notice(self, lead_s: float, source: str) -> None:
        """The node is to leave within ``lead_s`` seconds. Safe in a signal handler."""
        self._notice = self._notice or (lead_s, source)
        if self.node is not None:
            self.node.take_notice(lead_s, source)

    def hurry(self) -> None:
        """Leave without another word to the bucket, which may not answer. Safe in a signal handler."""
        self._hurries = True

    # -- the steps ----------------------------------------------------------------------------------------------------

    def _joined(self) -> Run | None:
        self._for_s("bucket")
        while self._notice is None:
            try:
                run = join(self._bucket, self._request, self._clock, self._say)
            except StoreUnavailable as error:
                self._told(error)
                if self._waited("bucket"):
                    raise NotAllHere(f"waited {self._timeout_s:g} s: {error.message}", error.hint) from error
            else:
                self._since.pop("bucket")
                self._failing = ""
                return run
        return None

    def _attend(self, node: Participant, progress: Progress) -> JobOutcome | None:
        arrived = False
        while not node.may_leave():
            try:
                if not arrived:
                    node.arrive()
                    arrived = True
                node.turn(self._left_s())
                if outcome := node.outcome():
                    node.linger()
                    return outcome
                self._failing = ""
                self._since.pop("refused", None)
            except (StoreUnavailable, StoreError) as error:
                self._bear(error, node)
                if self._notice is not None:
                    node.end_work(node.left_s - _MARGIN_S)
                    return None
            if self._notice is None:
                progress.tell(node)
            self._refuse_taken_rank(node)
            self._give_up(node)
        return None

    def _bear(self, error: GpuctlError, node: Participant) -> None:
        """Try again. What runs here needs no bucket: it goes on though that refuses us now, as after a change of
        rights. Raises the refusal where nothing runs."""
        ended = node.work is None or node.work.exit is not None
        if isinstance(error, StoreError) and (node.work is None or (ended and self._for_s("refused") > _REFUSED_S)):
            raise error
        self._told(error)

    def _told(self, error: GpuctlError) -> None:
        if self._failing != error.message:
            self._failing = error.message
            self._say(f"trying again: {error.message}")

    def _refuse_taken_rank(self, node: Participant) -> None:
        """Whoever holds a rank keeps it; but an earlier life of this very node is missed before that is said."""
        rank, round_ = self._attendee.rank, node.round
        taken = rank is not None and round_ is not None and round_.phase == "run" and rank < len(round_.members)
        if not taken or round_ is None or rank is None or round_.members[rank].node == node.node:
            self._since.pop("clash", None)
        elif self._for_s("clash") > _CLASH_S:
            holder = round_.members[rank]
            raise BadInput(
                f"rank {rank} of {node.run.name} is taken by {holder.node} ({holder.address})",
                "choose another --rank, or none",
            )

    def _give_up(self, node: Participant) -> None:
        if node.work is not None:
            self._since.pop("waiting", None)
        elif self._waited("waiting"):
            waited = f"waited {self._timeout_s:g} s for {node.run.name}: {_waited_for(node)}"
            raise NotAllHere(waited, "raise --timeout to wait longer")

    def _left_s(self) -> float:
        """Until the time to wait is over, if this node waits."""
        since = self._since.get("waiting")
        if since is None or self._timeout_s is None:
            return math.inf
        return max(0.05, since + self._timeout_s - self._clock.monotonic())

    def _waited(self, what: str) -> bool:
        return self._timeout_s is not None and self._for_s(what) > self._timeout_s

    def _for_s(self, what: str) -> float:
        """Seconds since this was first asked without a break."""
        now = self._clock.monotonic()
        return now - self._since.setdefault(what, now)


def _waited_for(node: Participant) -> str:
    round_ = node.round
    if round_ is not None and round_.phase in ("run", "drain"):
        return f"it runs on {len(round_.members)} others, and this one is a spare"
    try:
        return missing(node.run)
    except GpuctlError:
        return "the bucket does not tell who came"
