"""One way to write a file that others read: whole or not at all."""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path


def write_atomic(path: Path, data: bytes, *, mode: int | None = None, durable: bool = False) -> None:
    """Replace ``path``, whose folder exists: whoever opens it finds either what was there or all of ``data``.

    Args:
        mode: permissions, from the first byte on; ``None``: as the umask says.
        durable: also after a loss of power; else the file may be empty then. For what cannot be made anew.

    Raises ``OSError`` with a file name; then ``path`` is as it was, and nothing is left beside it.
    """
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")  # several processes may write it
    try:
        handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666 if mode is None else mode)
        with os.fdopen(handle, "wb") as file:
            if mode is not None:
                os.fchmod(handle, mode)
            file.write(data)
            if durable:
                file.flush()
                os.fsync(handle)
        partial.replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        if isinstance(error, OSError) and error.filename is None:  # as of a write: it says which disk is full
            error.filename = str(path)
        raise
