"""This node in a run, for the agent of torchrun: it lives on a thread of its own, and the agent asks it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Literal

from gpuctl.bootstrap.rendezvous.participant import Attendee
from gpuctl.bootstrap.rendezvous.runs import RunRequest
from gpuctl.bootstrap.rendezvous.session import Session
from gpuctl.cluster.clock import SystemClock
from gpuctl.cluster.records.rounds import JobOutcome, NodeExit, RankExit, Round
from gpuctl.cluster.storage.bucket import Bucket

_LEAD_S = 20.0
"""Of a notice by a signal: for the others to stop, and for this node to be gone."""
_LEAVE_S = 5.0


class RoundPart:
    """This node's part in one round, which the agent runs. See ``reconcile.Work``."""

    def __init__(self, round_: Round, rank: int, on_end: Callable[[], None], on_over: Callable[[], None]) -> None:
        self.round = round_
        self.rank = rank
        self.exit: NodeExit | None = None
        self.is_over = False
        """The agent is to stop its workers, and to come for the next round."""
        self._on_end = on_end
        self._on_over = on_over

    def is_of(self, round_: Round) -> bool:
        return (round_.job, round_.number) == (self.round.job, self.round.number)

    def ask_to_stop(self, round_: Round) -> None:  # noqa: ARG002
        self._over()

    def kill(self) -> None:
        self._over()

    def send_last_words(self) -> None:
        """The workers write to torchrun's own output."""

    def end(self) -> None:
        """Nothing is kept of it."""

    def ends(self, status: Literal["completed", "drained", "failed", "stopped"], *ranks: RankExit) -> None:
        """The agent's workers have ended so. The first word counts."""
        if self.exit is None:
            member = self.round.members[self.rank]
            self.exit = NodeExit(
                job=self.round.job,
                round=self.round.number,
                node=member.node,
                incarnation=member.incarnation,
                status=status,
                ranks=ranks,
                at=time.time(),
            )
            self._on_end()

    def _over(self) -> None:
        if not self.is_over:
            self.is_over = True
            self._on_over()


class ElasticNode:
    """All methods are for the agent's thread."""

    def __init__(
        self,
        bucket: Bucket,
        request: RunRequest,
        attendee: Attendee,
        timeout_s: float | None,
        say: Callable[[str], None],
    ) -> None:
        self._changed = threading.Condition()
        self._newest: RoundPart | None = None
        self.part: RoundPart | None = None
        """Of the round that the agent is in, though it may be over."""
        self._session = Session(
            bucket, request, attendee, self._begin, SystemClock(), say, timeout_s, ends_as_spare=True
        )
        self._thread = threading.Thread(target=self._stay, name="rendezvous", daemon=True)
        self.outcome: JobOutcome | None = None
        """How the run ended."""
        self.error: Exception | None = None
        """Why this node could not stay in it."""

    @property
    def has_ended(self) -> bool:
        """The run has, or this node's part in it."""
        return self._thread.ident is not None and not self._thread.is_alive()

    def next_part(self) -> RoundPart | None:
        """Leave the round of before, if any, and wait for the next one; ``None``: there is none any more."""
        before = self.part
        if before is None:
            self._thread.start()
        else:
            before.ends("drained" if before.is_over else "stopped")
        self._wait(lambda: self._newest is not before, None)
        if self._newest is before:
            return None
        self.part = self._newest
        return self.part

    def is_over(self, within_s: float | None) -> bool:
        """Whether the agent's round is over, or will be within that time; ``None``: until that is known, since the
        whole run may have ended first."""
        self._wait(lambda: self.part is not None and self.part.is_over, within_s)
        return self.part is not None and self.part.is_over and not self.has_ended

    def take_notice(self, source: str) -> None:
        """Have the others go on without this node."""
        self._session.take_notice(_LEAD_S, source)

    def leave(self) -> None:
        """After a notice, or the end: nothing runs here any more."""
        if self.part is not None:
            self.part.ends("drained")
        if self._thread.ident is not None:
            self._thread.join(_LEAVE_S)

    def _wait(self, condition: Callable[[], bool], within_s: float | None) -> None:
        with self._changed:
            self._changed.wait_for(lambda: condition() or self.outcome is not None or self._is_gone, within_s)

    # -- on the thread ------------------------------------------------------------------------------------------------

    _is_gone = False

    def _begin(self, round_: Round, rank: int, on_end: Callable[[], None]) -> RoundPart:
        with self._changed:
            if self._newest is not None:
                self._newest.is_over = True  # it had ended, so nobody was asked to stop
            part = self._newest = RoundPart(round_, rank, on_end, self._tell)
            self._changed.notify_all()
        return part

    def _tell(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _stay(self) -> None:
        try:
            self.outcome = self._session.stay()
        except Exception as error:  # noqa: BLE001 - the agent is told of it
            self.error = error
        finally:
            self._is_gone = True
            self._tell()
