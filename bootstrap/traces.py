"""What the agent leaves in ``/run/gpuctl`` for others on the machine: see ``boot`` for the files there.

Only on a machine of its own: ``local``'s nodes have none, and leave nothing.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from gpuctl.bootstrap.boot.leave import claim
from gpuctl.bootstrap.identity import Identity


class Traces:
    """What cannot be written is not: no job ends for it."""

    def __init__(self, identity: Identity) -> None:
        self._root = Path(identity.root) if identity.provider else None

    def touch_busy(self) -> None:
        """There is a job here at this moment, so the machine is not idle."""
        if self._root:
            with contextlib.suppress(OSError):
                folder = self._folder(self._root)
                folder.mkdir(parents=True, exist_ok=True)
                (folder / "busy").touch()

    def write_rank0(self, said: bytes) -> None:
        if self._root:
            with contextlib.suppress(OSError):
                folder = self._folder(self._root)
                folder.mkdir(parents=True, exist_ok=True)
                partial = folder / "rank0.partial"
                partial.write_bytes(said)
                partial.replace(folder / "rank0.json")

    def claim(self, why: str) -> None:
        """The cloud takes the machine: the idle watch need not."""
        if self._root:
            with contextlib.suppress(OSError):
                claim(self._root, why)

    @staticmethod
    def _folder(root: Path) -> Path:
        return root / "run/gpuctl"
