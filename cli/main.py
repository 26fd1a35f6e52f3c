"""The way in: run a verb, and turn a failure into one line and an exit code.

0: done. 1: failed. 2: bad input. 130: interrupted. ``train`` returns the exit code of the job.
``GPUCTL_DEBUG=1`` shows the traceback behind a failure.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.main import get_command

from gpuctl import __version__
from gpuctl.cli.verbs import Interrupted, ReaderLeft, VerbGroup, new_app
from gpuctl.cluster.errors import GpuctlError

_UsageError: Any = typer.BadParameter.__mro__[1]
"""What Typer raises for a bad command line. It has no public name of its own."""

_COMPLETE = "_GPUCTL_COMPLETE"

app = new_app(cls=VerbGroup, subcommand_metavar="VERB ...", no_args_is_help=False)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"gpuctl {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Rent spot GPUs, train on them, and treat losing a machine as a normal event.

    Start with: gpuctl up --nodes 4, gpuctl train script.py, gpuctl down
    """
    del version


def main(args: Sequence[str] | None = None) -> None:
    """Ends the process."""
    sys.exit(run(sys.argv[1:] if args is None else args))


def run(args: Sequence[str]) -> int:
    """Run the command line ``args``; returns the exit code."""
    if _COMPLETE in os.environ:
        from typer._completion_classes import completion_init

        completion_init()
    try:
        code = get_command(app).main(
            list(args) or ["--help"], prog_name="gpuctl", complete_var=_COMPLETE, standalone_mode=False
        )
        sys.stdout.flush()
    except (ReaderLeft, BrokenPipeError):
        # What is still buffered has no reader either: without this, Python complains of it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # as the shell has it: 128 + SIGPIPE
    except Interrupted as error:
        return _interrupted(str(error))
    except GpuctlError as error:
        return _fail(error, str(error), error.exit_code)
    except _UsageError as error:
        return _fail(error, _usage(error, args), 2)
    except (typer.Abort, KeyboardInterrupt):
        return _interrupted("interrupted")
    return code if isinstance(code, int) else 0


def _fail(error: BaseException, line: str, code: int) -> int:
    from gpuctl.cli.terminal import fail

    if os.environ.get("GPUCTL_DEBUG") == "1":
        raise error
    sys.stdout.flush()
    fail(line)
    return code


def _interrupted(line: str) -> int:
    from gpuctl.cli.terminal import say

    sys.stdout.flush()
    say(f"\n{line}" if sys.stderr.isatty() else line)  # after the terminal's own ^C
    return 130


def _usage(error: Any, args: Sequence[str]) -> str:
    """Typer's complaint as one of our lines."""
    message = " ".join(error.format_message().split()).rstrip(".")
    command = error.ctx.command_path if error.ctx is not None else "gpuctl"
    if args[:1] == ["train"] and message.startswith("No such option"):
        what = message.partition(" (")[0]
        return f"{what}; the script's own arguments go after `--`: gpuctl train script.py -- --lr 0.1"
    if message == "Missing command" and error.ctx is not None:
        message = f"say what: {', '.join(f'{command} {name}' for name in error.ctx.command.commands)}"
    return f"{message}; see `{command} --help`"


if __name__ == "__main__":
    main()
