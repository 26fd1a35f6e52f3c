"""How far a job is, in a line: its round, nodes, step, loss, speed and last checkpoint."""

from __future__ import annotations

import time

from gpuctl.cli.render.terminal import count, number
from gpuctl.cluster import layout
from gpuctl.cluster.agreement import ledgers
from gpuctl.cluster.agreement.ledger import Version
from gpuctl.cluster.errors import CorruptRecord
from gpuctl.cluster.jobs import queue
from gpuctl.cluster.records.checkpoints import CheckpointIndex
from gpuctl.cluster.records.codec import decode
from gpuctl.cluster.records.nodes import NodeRecord, TrainingProgress
from gpuctl.cluster.records.rounds import Round
from gpuctl.cluster.storage.bucket import Bucket

_BETWEEN = " · "
_LIST_EVERY = 30
"""Looks at the checkpoints between two that list them."""


class ProgressLine:
    """Reads how far a job is: two requests, as often as a heartbeat tells something new."""

    def __init__(self, store: Bucket, job: str) -> None:
        self._store = store
        self._every_s = max(1.0, 2 * queue.poll_s(store))
        self._ledger = ledgers.checkpoints(store, job)
        self._index: Version[CheckpointIndex] = Version(None, 0)
        self._progress: TrainingProgress | None = None
        self._looks = 0
        self._looked_at: float | None = None

    def text(self, current: Round | None, columns: int) -> str:
        """The line, without what does not fit into so many columns. Raises ``StoreUnavailable``."""
        if current is None or current.number == 0:
            return "queued"
        if not current.members:
            return f"round {current.number}{_BETWEEN}waiting for nodes"
        if self._looked_at is None or time.monotonic() - self._looked_at > self._every_s:
            self._looked_at = time.monotonic()
            self._look(current)
        return _fitting(self._parts(current), columns)

    def _look(self, current: Round) -> None:
        self._looks += 1
        try:
            again = self._looks % _LIST_EVERY != 1
            self._index = (self._ledger.newer(self._index.number) or self._index) if again else self._ledger.read()
            key = layout.node(current.members[0].node)  # rank 0's: it tells the loss
            data = self._store.get(key)
            self._progress = decode(data, NodeRecord, key).progress if data else None
        except CorruptRecord:  # of another version of gpuctl
            return

    def _parts(self, current: Round) -> list[str]:
        parts = [f"round {current.number}", count(len(current.members), "node")]
        if current.phase != "run":
            parts.append("stopping")
        said = self._progress
        if said is not None and (said.job, said.round) == (current.job, current.number):
            parts.append(f"step {said.step}" + (f" of {said.steps}" if said.steps is not None else ""))
            if said.loss is not None:
                parts.append(f"loss {number(said.loss)}")
            if said.steps_per_s is not None:
                parts.append(f"{number(said.steps_per_s)} steps/s")
        if self._index.value and self._index.value.entries:
            parts.append(f"checkpoint {self._index.value.entries[-1].step}")
        return parts


def _fitting(parts: list[str], columns: int) -> str:
    """
    >>> _fitting(["round 1", "2 nodes", "step 3"], 18)
    'round 1 · 2 nodes'
    """
    while len(parts) > 1 and len(_BETWEEN.join(parts)) > columns:
        parts = parts[:-1]
    return _BETWEEN.join(parts)
