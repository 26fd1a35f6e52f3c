"""What rank 0 reads of jobs besides their rounds: specs, exits, cancellations, used ports. Each is read once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from gpuctl.cluster import layout
from gpuctl.cluster.agreement.ledger import Ledger, Version
from gpuctl.cluster.errors import CorruptRecord
from gpuctl.cluster.jobs.queue import cancel_request
from gpuctl.cluster.records.codec import decode
from gpuctl.cluster.records.jobs import CancelRequest, JobSpec
from gpuctl.cluster.records.rounds import NodeExit, Round
from gpuctl.cluster.storage.interface import Store

_LAST_ENTRIES = 16
"""Of a job's ledger, that a new rank 0 looks through for ports that were used."""


class JobRecords:
    """A cache of jobs' records in the bucket. ``ledger`` opens a job's rounds."""

    def __init__(self, store: Store, ledger: Callable[[str], Ledger[Round]]) -> None:
        self._store = store
        self._ledger = ledger
        self._specs: dict[str, JobSpec] = {}
        self._exits: dict[tuple[str, int], dict[str, NodeExit]] = {}
        self._cancelled: dict[str, CancelRequest] = {}
        self._used_ports: dict[str, set[tuple[str, int]]] = {}

    def forget(self, job: str) -> None:
        """Drop what is kept of a job that has ended."""
        self._specs.pop(job, None)
        self._used_ports.pop(job, None)
        self._cancelled.pop(job, None)
        self._exits = {key: value for key, value in self._exits.items() if key[0] != job}

    def forget_ports(self) -> None:
        """Look through the ledgers again: another node may have led meanwhile."""
        self._used_ports.clear()

    def spec(self, job: str) -> JobSpec:
        """Raises ``CorruptRecord``."""
        if job not in self._specs:
            key = layout.job_spec(job)
            self._specs[job] = decode(self._store.get(key) or b"", JobSpec, key)
        return self._specs[job]

    def exits(self, job: str, current: Round) -> dict[str, NodeExit]:
        """Exits of the members of ``current``: another life of a node does not speak for this one."""
        found = self._exits.setdefault((job, current.number), {})
        folder = layout.exits(job, current.number)
        names = [e.key.rsplit("/", 1)[-1].removesuffix(".json") for e in self._store.list(folder)]
        missing = [name for name in names if name not in found]
        keys = [layout.node_exit(job, current.number, name) for name in missing]
        for name, key, data in zip(missing, keys, self._store.get_many(keys), strict=True):
            with contextlib.suppress(CorruptRecord):  # then that node is as good as silent
                node_exit = decode(data or b"", NodeExit, key)
                if current.rank_of(node_exit.node, node_exit.incarnation) is not None:
                    found[name] = node_exit
        return found

    def cancellation(self, job: str) -> CancelRequest | None:
        """The request to cancel the job, the more urgent one if there were two."""
        known = self._cancelled.get(job)
        if (known is None or not known.now) and (asked := cancel_request(self._store, job)):
            self._cancelled[job] = asked
        return self._cancelled.get(job)

    def used_ports(self, job: str, known: Version[Round]) -> set[tuple[str, int]]:
        """(incarnation, port) pairs that rounds of any job have used up. ``known``: the job's newest round."""
        entries = [known.value]
        if job not in self._used_ports:
            # Whatever a heartbeat that still counts can offer was used in the last rounds, or not at all.
            entries = [version.value for version in self._ledger(job).since(max(0, known.number - _LAST_ENTRIES))]
        used = {(r.members[0].incarnation, r.master_port) for r in entries if r and r.members}
        self._used_ports[job] = self._used_ports.get(job, set()) | used
        return set().union(*self._used_ports.values())
