"""A process of JAX, TensorFlow or Horovod that fails ends at once, as the others have to learn of it.

At its normal end each framework waits for the other processes, which are waiting for this one: so an exception in one
of them, or ``sys.exit(3)``, would hang all for minutes (JAX's shutdown barrier: 300 s), or have the others fail first.

Run as a program (``failing_exit.py SCRIPT ARGS…`` or ``failing_exit.py -m MODULE ARGS…``) it runs a script as Python
does, and ends it like that. Programs that start Python themselves have ``install``, for exceptions alone.

Also read by the interpreters of images, which have no gpuctl: the standard library only, from Python 3.8 on.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import runpy
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

WAIT_AT_THEIR_END = ("jax", "tensorflow", "horovod")
_PYTHON = re.compile(r"(.*/)?python[0-9.]*")
_FLAGS = ("-u", "-B", "-E", "-s", "-O", "-OO")
"""Of Python, without a value."""
_registered: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []
"""Exit functions that are not a framework's."""


def run_by(command: Sequence[str]) -> list[str]:
    """``command``, if it is Python with a script or a module, with this program to run that."""
    words = list(command)
    if not _PYTHON.fullmatch(words[0]):
        return words
    at = next((number for number, word in enumerate(words[1:], 1) if word not in _FLAGS), len(words))
    is_known = at < len(words) and (words[at].endswith(".py") or (words[at] == "-m" and at + 1 < len(words)))
    return [*words[:at], __file__, *words[at:]] if is_known else words


def install() -> None:
    """Have an exception that nobody catches end this process, once it has been told."""
    if os.environ.get("GPUCTL_LAUNCHER") in WAIT_AT_THEIR_END:
        sys.excepthook = _tell_and_end


def _tell_and_end(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
    try:
        sys.__excepthook__(kind, error, where)
    finally:
        _end(1)


def _end(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def main(args: list[str]) -> None:
    """Run the script or the module, whose ``__main__`` this is not."""
    register = atexit.register

    def kept(function: Callable[..., Any], *args: Any, **named: Any) -> Callable[..., Any]:
        if (getattr(function, "__module__", None) or "").partition(".")[0] not in WAIT_AT_THEIR_END:
            _registered.append((function, args, named))
        return register(function, *args, **named)

    atexit.register = kept  # type: ignore[assignment]
    try:
        if args[0] == "-m":
            sys.path[0] = str(Path.cwd())
            sys.argv = args[1:]
            runpy.run_module(args[1], run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(args[0]).resolve().parent)
            sys.argv = args
            runpy.run_path(args[0], run_name="__main__")
    except SystemExit as exit_:
        if exit_.code in (None, 0, False):
            raise
        if not isinstance(exit_.code, int):
            print(exit_.code, file=sys.stderr)
        _leave(exit_.code if isinstance(exit_.code, int) else 1)
    except BaseException as error:  # noqa: BLE001 - what Python itself does with an exception that nobody caught
        _tell(error)
        _leave(1)


def _tell(error: BaseException) -> None:
    """As Python would, without the frames that started the script."""
    where = error.__traceback__
    while where is not None and where.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        where = where.tb_next
    error = error.with_traceback(where)
    hook = sys.__excepthook__ if sys.excepthook is _tell_and_end else sys.excepthook
    try:
        hook(type(error), error, where)
    except Exception:  # noqa: BLE001 - a hook of the script's own
        traceback.print_exception(type(error), error, where)


def _leave(code: int) -> NoReturn:
    """End, with the exit functions of all but the framework."""
    for function, args, named in reversed(_registered):
        try:
            function(*args, **named)
        except Exception:  # noqa: BLE001 - as Python does at exit
            traceback.print_exc()
    _end(code & 0xFF)


if __name__ == "__main__":
    main(sys.argv[1:])
