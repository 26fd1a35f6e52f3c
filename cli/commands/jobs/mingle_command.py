"""A command that runs with those of other machines: ``gpuctl mingle -- CMD``."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from gpuctl.bootstrap.rendezvous.command import CommandRun
from gpuctl.bootstrap.rendezvous.participant import Attendee
from gpuctl.bootstrap.rendezvous.placement import placement_of
from gpuctl.bootstrap.rendezvous.runs import RunRequest
from gpuctl.bootstrap.rendezvous.session import Session
from gpuctl.cli.signals import Interrupted, Terminated
from gpuctl.cluster.clock import SystemClock
from gpuctl.cluster.errors import GpuctlError, StoreError
from gpuctl.cluster.records.rounds import Round
from gpuctl.cluster.storage.bucket import Bucket

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_FORWARDED = (signal.SIGUSR1, signal.SIGUSR2)


class RunFailed(GpuctlError):
    """The run ended, and not well. ``exit_code`` is that of the command that failed first."""


def run(
    bucket: Bucket,
    request: RunRequest,
    attendee: Attendee,
    command: Sequence[str],
    timeout_s: float | None,
    grace_s: float,
    say: Callable[[str], None],
    stop: int = signal.SIGTERM,
) -> None:
    """Run the command in each round until the run has ended.

    The first Ctrl-C, SIGTERM or SIGHUP has this node leave: the command is asked to end, and killed after ``grace_s``
    seconds; a second one kills it at once. ``stop`` is the signal by which it is asked. SIGUSR1 and SIGUSR2 go to the
    command.

    Raises what ``Session.stay`` does, ``RunFailed``, and ``Interrupted`` after a signal.
    """
    clock = SystemClock()
    runs: list[CommandRun] = []

    def begin(round_: Round, rank: int, on_end: Callable[[], None]) -> CommandRun:
        place = placement_of(round_, rank)
        runs[:] = [CommandRun(command, round_, rank, clock, on_end, stop)]
        runs[0].start(place.variables(os.environ))
        return runs[0]

    session = Session(bucket, request, attendee, begin, clock, say, timeout_s, ends_as_spare=True)
    try:
        with _signals(session, runs, grace_s) as received:
            outcome = session.stay()
    except StoreError as refusal:
        refusal.exit_code = (runs[0].exit_code if runs else None) or refusal.exit_code
        raise
    own = runs[0].exit_code if runs else None
    if outcome is not None and outcome.result == "succeeded":
        return
    if received:
        raise Interrupted("interrupted" if received[0] == signal.SIGINT else "terminated", 128 + received[0])
    if outcome is not None:
        error = RunFailed(f"run {request.id} failed: {outcome.message}", outcome.hint)
        error.exit_code = own or outcome.exit_code or 1
        raise error


@contextmanager
def _signals(session: Session, runs: Sequence[CommandRun], grace_s: float) -> Iterator[list[int]]:
    """The signals that have asked for an end. One that was ignored from the start, as by ``nohup``, stays ignored."""
    received: list[int] = []

    def end(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        if len(received) > 1:
            session.hurry()
            for run in runs:
                run.kill()
            raise Terminated(number)
        session.take_notice(grace_s, signal.Signals(number).name)

    def forward(number: int, _frame: FrameType | None) -> None:
        for run in runs:
            run.send(number)

    before = {number: signal.getsignal(number) for number in (*_ENDING, *_FORWARDED)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, end if number in _ENDING else forward)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
