"""``python -P -m gpuctl.bootstrap.rendezvous.keeper CMD …``: runs a command that does not outlive whoever started it.

A launcher whose starter is killed would train on, and hold its GPUs. The keeper's standard input is a pipe from the
starter, which writes to it now and then (see ``beat``), and which ends with it: then the keeper kills all that is below
it, also what has left its session. While nothing comes the command stands still: its starter was stopped, the others go
on without it, and two of one rank would write the same checkpoint. The keeper ends as the command does, by the same
signal or with the same code.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
from typing import IO

import psutil

from gpuctl.trainers.launchers.descendants import adopt_orphans, end_orphans

NOT_STARTED = 127
"""Exit code of a command that cannot be started, as the shell has it."""
BEAT_S = 0.5
_SILENT_S = 2.5
"""Without a beat. Later than that, the other nodes begin a round without this one."""
_OURS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Sent to all of the session, and for the command to act on."""


def beat(pipe: IO[bytes], ended: threading.Event) -> None:
    """In the starter, from a thread: write to the keeper's standard input until the command has ended."""
    with contextlib.suppress(OSError, ValueError):  # the keeper has ended, or the pipe was closed for it to end
        while not ended.wait(BEAT_S):
            pipe.write(b".")
            pipe.flush()


def main(command: list[str]) -> None:
    adopt_orphans()
    for number in _OURS:
        signal.signal(number, lambda *_: None)  # not ignored, or the command would inherit that
    try:
        process = _started(command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(NOT_STARTED)
    threading.Thread(target=_mind_starter, name="starter", daemon=True).start()
    code = process.wait()
    end_orphans(())
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 128 - code)


def _started(command: list[str]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL)
    except OSError as error:
        if error.errno != errno.ENOEXEC:
            raise
        # A script without a first line that says what runs it: a shell does, as when it is typed there.
        return subprocess.Popen(
            ["/bin/sh", shutil.which(command[0]) or command[0], *command[1:]], stdin=subprocess.DEVNULL
        )


def _mind_starter() -> None:
    stopped: list[psutil.Process] = []
    while True:
        if not select.select([0], [], [], _SILENT_S)[0]:
            stopped = stopped or _all_below(signal.SIGSTOP)
        elif not os.read(0, 4096):
            end_orphans(())
            os._exit(128 + signal.SIGKILL)
        elif stopped:
            _send(stopped, signal.SIGCONT)
            stopped = []


def _all_below(number: int) -> list[psutil.Process]:
    below = psutil.Process().children(recursive=True)
    _send(below, number)
    return below


def _send(processes: list[psutil.Process], number: int) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)


if __name__ == "__main__":
    main(sys.argv[1:])
