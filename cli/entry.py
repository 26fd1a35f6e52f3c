"""The command ``gpuctl``: Ctrl-C is one line from here on, also while ``main`` and what it needs is imported.

Import it in a process that is the command and nothing else. It imports nothing that is not there already.
"""

import _signal  # type: ignore[import-not-found]  # what signal itself imports, after enum and more
import os


def main() -> None:
    """Run the command line, and exit the process."""
    from gpuctl.cli.main import main as begin

    begin()


def _leave(*_: object) -> None:
    """There is nothing yet to clean up, and a KeyboardInterrupt would be a traceback into the imports."""
    os.write(2, b"interrupted\n")
    os._exit(130)


if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:  # else it is ignored, as after nohup
    _signal.signal(_signal.SIGINT, _leave)
