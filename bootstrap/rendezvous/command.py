"""The command that runs in a round: begun, asked to end, killed, and how it ended. See ``reconcile.Work``."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from gpuctl.bootstrap.rendezvous import keeper
from gpuctl.cluster.clock import Clock
from gpuctl.cluster.records.rounds import NodeExit, RankExit, Round


class CommandRun:
    """A command in one round, in a session of its own; ``exit`` is set once all that it has started is gone.

    Its standard input is empty: a command that is begun anew in each round has nobody to talk to.
    """

    def __init__(
        self,
        command: Sequence[str],
        round_: Round,
        rank: int,
        clock: Clock,
        on_end: Callable[[], None],
        stop: int = signal.SIGTERM,
    ) -> None:
        """``stop``: by which signal it is asked to end."""
        self.round = round_
        self.exit: NodeExit | None = None
        self.exit_code: int | None = None
        """The command's own, as the shell has it, unless gpuctl has ended it."""
        self._command = list(command)
        self._rank = rank
        self._clock = clock
        self._on_end = on_end
        self._stop = stop
        self._killed = False
        self._deadline: float | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, variables: Mapping[str, str]) -> None:
        """Run the command with these variables besides this process's own."""
        # -P: not from the folder where the command is run, which may have modules of any name.
        command = [sys.executable, "-P", "-m", "gpuctl.bootstrap.rendezvous.keeper", *self._command]
        env = {**os.environ, **variables}
        # The write end of its standard input stays open, in this object, as long as this process lives.
        self._process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, start_new_session=True)
        assert self._process.stdin is not None
        ended = threading.Event()
        for target, args in ((keeper.beat, (self._process.stdin, ended)), (self._wait, (self._process, ended))):
            threading.Thread(target=target, args=args, name="command", daemon=True).start()

    def is_of(self, round_: Round) -> bool:
        return (round_.job, round_.number) == (self.round.job, self.round.number)

    def ask_to_stop(self, round_: Round) -> None:
        """Its signal, and SIGKILL once the time that the round gives is over."""
        if self._deadline is None:
            self._deadline = self._clock.monotonic() + round_.drain_s
            self.send(self._stop)
        elif self._clock.monotonic() > self._deadline:
            self.kill()

    def send(self, number: int) -> None:
        """Send a signal to the command, and to what it has started in its session."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def kill(self) -> None:
        """End all that the command has started: its keeper does, once nobody holds its standard input any more."""
        self._killed = True
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    def send_last_words(self) -> None:
        """It has written to this process's own output."""

    def end(self) -> None:
        """Nothing is kept of it."""

    def _wait(self, process: subprocess.Popen[bytes], ended: threading.Event) -> None:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # until it is reaped, its number is nobody else's
        ended.set()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
        name = signal.Signals(-code).name if code < 0 else ""
        code = 128 - code if code < 0 else code
        if self._killed:
            self._end("stopped", None, name)
        elif self._deadline is not None:
            self._end("drained" if code in (0, 128 + self._stop) else "stopped", None, name)
        else:
            self._end("completed" if code == 0 else "failed", code, name)

    def _end(self, status: Literal["completed", "drained", "failed", "stopped"], code: int | None, name: str) -> None:
        self.exit_code = code
        member, at = self.round.members[self._rank], self._clock.time()
        failure = RankExit(rank=self._rank, local_rank=0, exit_code=code or 1, signal=name, at=at)
        self.exit = NodeExit(
            job=self.round.job,
            round=self.round.number,
            node=member.node,
            incarnation=member.incarnation,
            status=status,
            ranks=(failure,) if status == "failed" else (),
            at=at,
        )
        self._on_end()


class Meeting:
    """Nothing runs: to be in the round is all. So it has ended well as soon as it has begun."""

    def __init__(self, round_: Round, rank: int, clock: Clock) -> None:
        member = round_.members[rank]
        self.round = round_
        self.exit: NodeExit | None = NodeExit(
            job=round_.job,
            round=round_.number,
            node=member.node,
            incarnation=member.incarnation,
            status="completed",
            at=clock.time(),
        )

    def is_of(self, round_: Round) -> bool:
        return (round_.job, round_.number) == (self.round.job, self.round.number)

    def ask_to_stop(self, round_: Round) -> None: ...

    def kill(self) -> None: ...

    def send_last_words(self) -> None: ...

    def end(self) -> None: ...
