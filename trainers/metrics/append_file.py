"""A file that records are appended to, each as a whole: what a full disk has no room for is dropped."""

from __future__ import annotations

import errno
import os
from pathlib import Path

_FULL = (errno.ENOSPC, errno.EDQUOT)


class AppendFile:
    """Opened, and made with its folder, at once. Raises ``OSError``."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._rest = b""
        """Of a record that there was room for in part only: those that read along have its beginning."""

    def append(self, record: bytes) -> None:
        """Raises ``OSError``, but not for a full disk."""
        try:
            while self._rest:
                self._rest = self._rest[os.write(self._file, self._rest) :]
            while len(record) > (written := os.write(self._file, record)):
                self._rest = record = record[written:]
            self._rest = b""
        except OSError as error:
            if error.errno not in _FULL:
                raise
