"""How the ranks of one save come together in the background: each hands in its report, rank 0 answers.

It goes through the job's store (a ``TCPStore``), over a connection of its own. Not through a process group: collectives
in the background of a training have crashed it where they shared its group (``docs/decisions/0011``), and a group of
our own would go when the script destroys its groups, with the last save still on its way.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from torch.distributed import DistError, Store

from gpuctl.cluster.errors import GpuctlError
from gpuctl.trainers.checkpoint.save.uploader import AFTER_END_S
from gpuctl.trainers.world import World, job_store

_PIECE_BYTES = 4 << 20
"""The store takes up to 8 MiB at once."""
_POLL_S = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2)
_ALONE_S = AFTER_END_S + 180.0
"""How long a process that has nothing else to do waits for the others. One that an outage holds up tells of it when it
gives up, at most this long after its own end. One that was killed holds nobody up: what started them ends the rest."""


class PeersGone(GpuctlError):
    """Other ranks are gone, so a save cannot be completed. What started them starts them anew."""


class StoreGather:
    """Gathers bytes from all ranks through the process group's store. One lasts as long as the group; ``name`` is the
    same on all ranks and not used before. One thread uses it."""

    def __init__(self, name: str, now: Callable[[], float] = time.monotonic) -> None:
        self._world = World.now()
        self._now = now
        self._store: Store | None = job_store(name) if self._world.size > 1 else None
        self._answered: list[str] = []

    def exchange(self, number: int, report: bytes) -> list[bytes] | None:
        """Hand in this rank's ``report`` on save ``number``. Returns all of them, in rank order, on rank 0, which then
        owes an ``answer``; ``None`` on the others.

        Raises ``PeersGone``.
        """
        if self._store is None:
            return [report]
        if self._world.rank != 0:
            self._put(f"{number}/{self._world.rank}", report)
            return None
        reports = [report, *(self._take(f"{number}/{rank}") for rank in range(1, self._world.size))]
        self._delete(self._answered)  # whoever reports on this save has read the answer to the one before
        return reports

    def answer(self, number: int, outcome: bytes) -> None:
        """Send rank 0's answer to all. Raises ``PeersGone``."""
        if self._store is not None:
            self._answered = self._put(f"{number}/outcome", outcome)

    def outcome(self, number: int) -> bytes:
        """Rank 0's answer. Raises ``PeersGone``."""
        assert self._store is not None, "rank 0 knows its own answer"
        return self._take(f"{number}/outcome", keep=True)

    def _put(self, key: str, data: bytes) -> list[str]:
        """The keys that were written."""
        assert self._store is not None
        pieces = [data[at : at + _PIECE_BYTES] for at in range(0, len(data), _PIECE_BYTES)] or [b""]
        try:
            for number, piece in enumerate(pieces):
                self._store.set(f"{key}/{number}", piece)  # type: ignore[arg-type]  # bytes are taken as they are
            self._store.set(key, str(len(pieces)))
        except DistError as error:
            raise PeersGone(f"the job's store is gone: {error}") from error
        return [key, *(f"{key}/{number}" for number in range(len(pieces)))]

    def _take(self, key: str, keep: bool = False) -> bytes:
        assert self._store is not None
        try:
            self._await(key)
            names = [f"{key}/{number}" for number in range(int(self._store.get(key)))]
            data = b"".join(self._store.get(name) for name in names)
        except DistError as error:
            raise PeersGone(f"the job's store is gone: {error}") from error
        if not keep:
            self._delete([key, *names])
        return data

    def _delete(self, keys: Sequence[str]) -> None:
        assert self._store is not None
        try:
            for key in keys:
                self._store.delete_key(key)
        except DistError as error:
            raise PeersGone(f"the job's store is gone: {error}") from error

    def _await(self, key: str) -> None:
        """Until ``key`` is there. The training waits for nobody here, so neither does this while it goes on; but a
        process that wants to end does not wait for peers that have ended."""
        assert self._store is not None
        alone_since: float | None = None
        pauses: Sequence[float] = _POLL_S
        for turn in range(1 << 62):
            if self._store.check([key]):
                return
            if not threading.main_thread().is_alive():
                alone_since = alone_since or self._now()
                if self._now() - alone_since > _ALONE_S:
                    raise PeersGone("the other ranks have not finished their part of the checkpoint")
            time.sleep(pauses[min(turn, len(pauses) - 1)])
