"""What a worker prints while the disk that holds its log is full is dropped; the training goes on.

The log tells how much is missing once there is room again; ``gpuctl status`` tells of the disk meanwhile. This is
about what Python prints: native code hardly ever looks at whether it could, and other programs see to themselves.

Also read by the interpreters of images, which have no gpuctl: the standard library only, from Python 3.8 on.
"""

from __future__ import annotations

import errno
import io
import os
import re
import sys
from typing import Any, TextIO

_FULL = (errno.ENOSPC, errno.EDQUOT)
_LOG = re.compile(r"/attempt_\d+/\d+/std(out|err)\.log$")
"""Where torch's launcher has a worker print to."""
_missing = {"bytes": 0}
"""Of stdout and stderr together, as they have one log."""


class LogFile(io.FileIO):
    """Standard output or error of a worker.

    Args:
        fd: its number; it stays open.
        mark: what each line begins with in the log.
    """

    def __init__(self, fd: int, mark: bytes = b"") -> None:
        super().__init__(fd, "w", closefd=False)
        self._mark = mark

    def write(self, data: Any) -> int:
        """Write all of it, or drop what there is no room for. Raises as a file does for any other reason."""
        given = bytes(data)
        text = b"".join(self._mark + line for line in given.splitlines(keepends=True)) if self._mark else given
        try:
            if _missing["bytes"]:
                self._write_all(
                    b"\ngpuctl: %d bytes of output are missing here: the disk was full\n" % _missing["bytes"]
                )
                _missing["bytes"] = 0
            self._write_all(text)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            _missing["bytes"] += len(given)
        return len(given)

    def _write_all(self, text: bytes) -> None:
        while text:
            text = text[super().write(text) or 0 :]


def install() -> None:
    """Have this process outlive a full disk if it is a worker, and one that it starts if that prints where it does: a
    file of its own choice must not lack a part."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        try:
            is_log = _LOG.search(os.readlink(f"/proc/self/fd/{stream.fileno()}"))  # noqa: PTH115 - Path has it from 3.9 on
        except (AttributeError, OSError, ValueError):  # closed, or not Linux
            continue
        if is_log:
            opened = to_log(stream, LogFile(stream.fileno()))
            setattr(sys, name, opened)
            setattr(sys, f"__{name}__", opened)


def to_log(stream: TextIO, file: LogFile) -> io.TextIOWrapper:
    """A stream that writes to ``file``, and as ``stream`` otherwise."""
    stream.flush()
    through = bool(getattr(stream, "write_through", False))
    return io.TextIOWrapper(
        file if through else io.BufferedWriter(file),  # as Python itself does with -u
        stream.encoding,
        stream.errors,
        line_buffering=bool(getattr(stream, "line_buffering", False)),
        write_through=through,
    )
