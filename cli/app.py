"""The verbs as one program: what is wrong becomes one line and an exit code (see ``main``)."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.main import get_command

from gpuctl import __version__
from gpuctl.cli.signals import Interrupted
from gpuctl.cli.text_commands import new_app
from gpuctl.cli.verbs import ReaderLeft, VerbGroup
from gpuctl.cluster.errors import INTERRUPTED, GpuctlError

_UsageError: Any = typer.BadParameter.__mro__[1]
"""What Typer raises for a bad command line. It has no public name of its own."""

_FULL = (errno.ENOSPC, errno.EDQUOT)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
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


def invoke(args: Sequence[str]) -> int:
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
        from gpuctl.cli.render.terminal import give_up

        give_up(sys.stdout)
        return 141  # as the shell has it: 128 + SIGPIPE
    except Interrupted as error:
        return _interrupted(str(error), error.exit_code)
    except GpuctlError as error:
        return _fail(error, str(error), error.exit_code)
    except _UsageError as error:
        return _fail(error, _usage(error, args), 2)
    except ModuleNotFoundError as error:
        from gpuctl.stacks.clouds.extras import not_installed

        missing = not_installed(error)
        if missing is None:
            raise
        return _fail(error, str(missing), missing.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        return _interrupted("interrupted", INTERRUPTED)
    except OSError as error:
        if (line := _of_this_machine(error)) is None:
            raise
        return _fail(error, line, 1)
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # of a package in Rust, each of which has one of its own
            raise
        why = str(error).partition("\n")[0]
        return _fail(error, f"a library of gpuctl's broke off: {why}; report it, with what you typed", 1)
    return code if isinstance(code, int) else 0


def _fail(error: BaseException, line: str, code: int) -> int:
    from gpuctl.cli.render.terminal import fail

    if _COMPLETE in os.environ:
        return code  # into the line that is being typed
    if os.environ.get("GPUCTL_DEBUG") == "1":
        raise error
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    fail(line)
    return code


def _interrupted(line: str, code: int) -> int:
    from gpuctl.cli.render.terminal import say

    sys.stdout.flush()
    say(f"\n{line}" if sys.stderr.isatty() else line)  # after the terminal's own ^C
    return code


def _of_this_machine(error: OSError) -> str | None:
    """The message for a full disk, a folder that may not be written and the like; ``None`` for what is no fault of the
    user's."""
    from gpuctl.cli.render.terminal import give_up
    from gpuctl.stacks.state.paths import state_dir

    why = os.strerror(error.errno or 0)
    if error.filename is None:
        if error.errno not in _FULL:
            return None
        give_up(sys.stdout)
        return f"cannot write: {why}; make room where the output goes"
    folder = state_dir()
    path = Path(os.fsdecode(error.filename))
    if path.is_relative_to(folder) or folder.is_relative_to(path):  # the latter while the folder is made
        fix = "free some space" if error.errno in _FULL else "set GPUCTL_STATE_DIR to another folder"
        if error.errno in _FORBIDDEN and any((folder / "clusters").glob("*.json")):
            fix = "make it writable: your clusters are noted there"  # and in another folder would not be known
        return f"cannot use the state folder {folder}: {why}; {fix}"
    return f"{os.fsdecode(error.filename)}: {why}" if error.errno in {*_FULL, *_FORBIDDEN} else None


def _usage(error: Any, args: Sequence[str]) -> str:
    """Typer's complaint as one of our lines."""
    message = " ".join(error.format_message().split()).rstrip(".")
    if error.ctx is not None:
        command = error.ctx.command_path
    else:  # as of a flag without its value
        command = " ".join(["gpuctl", *(word for word in args[:1] if not word.startswith("-"))])
    if args[:1] == ["train"] and message.startswith("No such option"):
        what = message.partition(" (")[0]
        return f"{what}; the script's own arguments go after `--`: gpuctl train script.py -- --lr 0.1"
    if message == "Missing command" and error.ctx is not None:
        message = f"say what: {', '.join(f'{command} {name}' for name in error.ctx.command.commands)}"
    return f"{message}; see `{command} --help`"
