"""A process of JAX, TensorFlow or Horovod that raises ends at once, as the others have to learn of it.

At its normal end each framework waits for the other processes, which are waiting for this one: so an exception in one
of them would hang all, for minutes (JAX's shutdown barrier: 300 s).

Also read by the interpreters of images, which have no gpuctl: the standard library only, from Python 3.8 on.
"""

from __future__ import annotations

import contextlib
import os
import sys
from types import TracebackType

_WAIT_AT_THEIR_END = ("jax", "tensorflow", "horovod")


def install() -> None:
    """Have an exception that nobody catches end this process, once it has been told."""
    if os.environ.get("GPUCTL_LAUNCHER") in _WAIT_AT_THEIR_END:
        sys.excepthook = _tell_and_end


def _tell_and_end(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
    try:
        sys.__excepthook__(kind, error, where)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
    finally:
        os._exit(1)
