"""Whether there is room on a disk."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

_FULL_BYTES = 64 * 1024


class _Located(Protocol):
    @property
    def url(self) -> str: ...


def full_disk(folder: Path) -> str:
    """What to say of the disk that holds ``folder`` if it has no room left; nothing else."""
    try:
        is_full = shutil.disk_usage(folder).free < _FULL_BYTES
    except OSError:  # there is no such folder (yet)
        return ""
    return f"no space left on the disk that holds {folder}" if is_full else ""


def used_share(folder: Path) -> float:
    """How full the disk that holds ``folder`` is, from 0 to 1, as ``df`` tells it: of what its users may fill, which
    leaves out the blocks kept for root and a quota's rest. 0 where there is no such folder."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return 0.0
    return usage.used / ((usage.used + usage.free) or 1)  # neither, on what is not a disk, such as /proc


def full_bucket(store: _Located) -> str:
    """The same of a bucket that is a folder on this machine."""
    parts = urlsplit(store.url)
    return full_disk(Path(unquote(parts.path))) if parts.scheme == "file" else ""
