"""What the agent leaves in ``/run/gpuctl`` for others on the machine: see ``boot`` for the files there.

Only on a machine of its own: ``local``'s nodes have none, and leave nothing.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from gpuctl.bootstrap.boot.leave import claim
from gpuctl.bootstrap.identity import NodeIdentity
from gpuctl.cluster.atomic_write import write_atomic
from gpuctl.cluster.clock import Clock

MOST_WAIT_S = 30 * 60.0
"""While a job waits for nodes that it lacks, those that it has are not idle; but not longer than this."""


class HostFiles:
    """The files by which a node's host knows what its agent does. What cannot be written is left out: no job ends for
    it."""

    def __init__(self, identity: NodeIdentity, clock: Clock) -> None:
        self._root = Path(identity.root) if identity.provider else None
        self._clock = clock
        self._waiting_since: float | None = None

    def show(self, *, works: bool, waits: bool) -> None:
        """Whether a job runs here, and whether there is one that could. Call it on every turn of the agent's loop."""
        now = self._clock.monotonic()
        if works or not waits:
            self._waiting_since = None
        elif self._waiting_since is None:
            self._waiting_since = now
        if works or (self._waiting_since is not None and now - self._waiting_since < MOST_WAIT_S):
            self._write("busy", None)

    def write_rank0(self, said: bytes) -> None:
        self._write("rank0.json", said)

    def write_ill(self, words: str) -> None:
        """The machine may be replaced, for this reason."""
        self._write("ill", words.encode())

    def claim(self, why: str) -> None:
        """The cloud takes the machine: the idle watch need not."""
        if self._root:
            with contextlib.suppress(OSError):
                claim(self._root, why)

    def _write(self, name: str, said: bytes | None) -> None:
        """``said`` into the file ``name``; ``None`` only touches it."""
        if self._root is None:
            return
        path = self._root / "run/gpuctl" / name
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            if said is None:
                path.touch()
                return
            write_atomic(path, said)
