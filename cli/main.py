"""The way in: run a verb, and end with its exit code.

0: done. 1: failed. 2: bad input. 130: interrupted; 143, 129: by SIGTERM, SIGHUP. ``train`` returns the exit code of
the job.
``GPUCTL_DEBUG=1`` shows the traceback behind a failure.

What is imported here takes no time, so that Ctrl-C is one line from the start.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line, and exit the process."""
    code = run(sys.argv[1:] if args is None else args, _let_ctrl_c_raise)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python would tell of one more Ctrl-C in a traceback
    sys.exit(code)


def run(args: Sequence[str], begun: Callable[[], None] = lambda: None) -> int:
    """Run the command line ``args``; returns the exit code. ``begun`` is called before the verb does anything."""
    _open_what_is_closed()
    try:
        from gpuctl.cli.app import invoke  # a quarter of a second

        begun()
        return invoke(args)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130


def _let_ctrl_c_raise() -> None:
    """From now on there is something to clean up (see ``entry``)."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _open_what_is_closed() -> None:
    """Open the standard streams that are closed (``2>&-``): the next file opened would take their number, and be
    written to."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w", closefd=False))


if __name__ == "__main__":
    main()
