"""Room on the disk with the images: those that a node has pulled for jobs go when it is full, so that one that lives
for months can pull the next.

Only images that gpuctl pulled, and not the two that were used last. The runtime itself refuses to remove one that a
container still has.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from gpuctl.cluster.atomic_write import write_atomic
from gpuctl.cluster.disk import used_share

_NEWEST = 2
_FULL = 0.8


class PulledImages:
    """Not thread-safe.

    Args:
        note: the file that keeps their names, with the time of their last use, in seconds since the epoch.
        say: prints a line to the agent's log.
        used: tells how full the disk of a folder is, from 0 to 1.
    """

    def __init__(
        self,
        note: Path,
        say: Callable[[str], None],
        used: Callable[[Path], float] = used_share,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._note = note
        self._say = say
        self._used = used
        self._now = now

    def pulled(self, name: str) -> None:
        self._write({**self._read(), name: self._now()})

    def use(self, name: str) -> None:
        """Take note of it, if it is one of those."""
        if name in self._read():
            self.pulled(name)

    def make_room(self, folder: Path, remove: Callable[[str], bool]) -> list[str]:
        """Remove images until there is room on the disk of ``folder``, the one first that was used longest ago.

        Args:
            folder: where the runtime keeps them.
            remove: removes one; ``False``: it is still there.

        Returns the names of those that are gone.
        """
        found = self._read()
        gone = []
        for name in sorted(found, key=lambda one: found[one])[:-_NEWEST]:
            if self._used(folder) <= _FULL:
                break
            self._say(f"removing image {name}, which no job has used since others came")
            if remove(name):
                gone.append(name)
        if gone:
            self._write({name: at for name, at in found.items() if name not in gone})
        return gone

    def _read(self) -> dict[str, float]:
        try:
            return msgspec.json.decode(self._note.read_bytes(), type=dict[str, float])
        except (OSError, msgspec.MsgspecError):
            return {}

    def _write(self, found: dict[str, float]) -> None:
        with contextlib.suppress(OSError):  # the disk may be full: then an image is not known to be old
            write_atomic(self._note, msgspec.json.encode(found))
