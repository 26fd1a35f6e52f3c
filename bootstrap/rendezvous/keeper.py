"""``python -m gpuctl.bootstrap.rendezvous.keeper CMD …``: runs a command that does not outlive whoever started it.

A launcher whose starter is killed would train on, and hold its GPUs. The keeper's standard input is a pipe from the
starter, which ends with it; then the keeper kills all that is below it, also what has left its session. It ends as the
command does, by the same signal or with the same code.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

from gpuctl.trainers.launchers.descendants import adopt_orphans, end_orphans

NOT_STARTED = 127
"""Exit code of a command that cannot be started, as the shell has it."""
_OURS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Sent to all of the session, and for the command to act on."""


def main(command: list[str]) -> None:
    adopt_orphans()
    for number in _OURS:
        signal.signal(number, lambda *_: None)  # not ignored, or the command would inherit that
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(NOT_STARTED)
    threading.Thread(target=_end_with_starter, name="starter", daemon=True).start()
    code = process.wait()
    end_orphans(())
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -code)
    sys.stderr.flush()
    os._exit(code if code >= 0 else 128 - code)


def _end_with_starter() -> None:
    os.read(0, 1)
    end_orphans(())
    os._exit(128 + signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
