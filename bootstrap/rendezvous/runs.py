"""Which run of an ID a node joins, and how the first one begins it.

An ID is a name that people choose, and may use again. Each use is a run of its own, with its own key and its own folder
in the bucket, so that nothing of an earlier one can be taken for this one. The ledger of an ID's runs decides which is
the newest: of two nodes that come first at the same moment, one begins it, and the other joins.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from gpuctl.cluster import layout
from gpuctl.cluster.agreement import ledgers
from gpuctl.cluster.agreement.ledger import Ledger, Version
from gpuctl.cluster.agreement.probe import probe
from gpuctl.cluster.clock import Clock
from gpuctl.cluster.errors import BadInput, CorruptRecord, GpuctlError, StoreUnavailable
from gpuctl.cluster.jobs import queue
from gpuctl.cluster.network.tcp_probe import ProbeTarget, contacts
from gpuctl.cluster.records.codec import decode, encode
from gpuctl.cluster.records.jobs import JobSpec
from gpuctl.cluster.records.nodes import NodeRecord
from gpuctl.cluster.records.runs import RunSpec
from gpuctl.cluster.retry import ATTEMPTS
from gpuctl.cluster.storage.bucket import Bucket

LEASE_S = 4.0
"""Of a node in a round, in seconds without a new heartbeat. Silence on the direct line tells of a loss before that."""
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_LOOK_S = 0.5


@dataclass(frozen=True, slots=True)
class RunRequest:
    """What a node that comes wants: the ID, and how many are to meet."""

    id: str
    nodes_min: int
    nodes_max: int
    max_restarts: int = 0
    host: str = ""
    launch: str = ""
    """See ``RunSpec``."""

    def __post_init__(self) -> None:
        if not isinstance(self.id, str) or not _ID.fullmatch(self.id):
            shown = self.id if len(str(self.id)) <= 40 else f"{self.id[:40]}…"
            raise BadInput(
                f"{shown!r} cannot be an ID", "use up to 63 letters, digits, dots, dashes and underscores, no slashes"
            )


@dataclass(frozen=True, slots=True)
class Run:
    """One use of an ID. ``store`` is its folder in the bucket."""

    id: str
    number: int
    spec: RunSpec
    store: Bucket

    @property
    def name(self) -> str:
        """For people: the ID, and which use of it if that is not the first."""
        return self.id if self.number == 1 else f"{self.id} (run {self.number})"


def join(bucket: Bucket, request: RunRequest, clock: Clock, say: Callable[[str], None]) -> Run:
    """The run of this ID that has not ended; a new one if there is none.

    Raises ``BadInput`` if nodes are in one of another size, ``StoreUnavailable`` (call it again), ``StoreError``.
    """
    probe(bucket)
    ledger = ledgers.runs(bucket, request.id)
    for _ in range(ATTEMPTS):
        newest = _newest(ledger, request.id)
        if newest.value is not None:
            run = _opened(bucket, request.id, newest)
            if queue.outcome(run.store, run.id) is None:
                if _fits(run, request, clock, say):
                    _submit(run)
                    return run
                queue.end_as_cancelled(run.store, run.id, "all its nodes have left")
        spec = RunSpec(
            nodes_min=request.nodes_min,
            nodes_max=request.nodes_max,
            key=secrets.token_hex(16),
            max_restarts=request.max_restarts,
            launch=request.launch,
            begun_by=request.host,
            begun_at=time.time(),
        )
        if ledger.commit(spec, newest.number):
            run = _opened(bucket, request.id, Version(spec, newest.number + 1))
            _submit(run)
            _forget(bucket, request.id, run.number - 2)
            return run
    raise StoreUnavailable(f"other nodes kept beginning runs of {request.id}", "try again")


def _newest(ledger: Ledger[RunSpec], run_id: str) -> Version[RunSpec]:
    try:
        return ledger.read()
    except CorruptRecord as error:
        raise BadInput(str(error), f"use another --id, or delete mingle/{run_id}/ in the bucket") from error


def _fits(run: Run, request: RunRequest, clock: Clock, say: Callable[[str], None]) -> bool:
    """Whether a run that has not ended is the one that is asked for; ``False``: nobody is left in it, and it was for
    something else. Raises ``BadInput`` if somebody is, and its size is another one."""
    same_size = _size(run.spec) == (request.nodes_min, request.nodes_max)
    same_launch = run.spec.launch == request.launch
    if same_size and same_launch and run.spec.max_restarts == request.max_restarts:
        return True
    begun = f"--max-restarts {run.spec.max_restarts}"
    if not same_size:
        begun = f"--nodes {_text(run.spec)}"
    elif not same_launch:
        begun = run.spec.launch or "no --launcher"
    say(f"run {run.name} was begun with {begun}; looking whether any of its nodes is left")
    living = _first_living(run.store, clock)
    if living and not (same_size and same_launch):
        same = "--launcher and --nproc" if same_size else "--nodes"
        raise BadInput(
            f"{run.id} is in use with {begun}: {living.host or living.node} ({living.address}) is in it",
            f"use the same {same}, or another --id",
        )
    if living:
        say(f"{begun} counts for {run.name}, which {living.host or living.node} ({living.address}) is in")
    return living is not None


def _opened(bucket: Bucket, run_id: str, version: Version[RunSpec]) -> Run:
    assert version.value is not None
    return Run(run_id, version.number, version.value, bucket.at(layout.run(run_id, version.number)))


def _submit(run: Run) -> None:
    """Put the run's only job in line. Each node does, since the one that began the run may have died in between."""
    spec = JobSpec(
        job=run.id,
        number=1,
        script="",
        nodes_min=run.spec.nodes_min,
        nodes_max=run.spec.nodes_max,
        max_restarts=run.spec.max_restarts,
        exit_timeout_s=0,
        submitted_at=run.spec.begun_at,
        submitted_by=run.spec.begun_by,
    )
    line = ledgers.queue(run.store)
    if line.read().number == 0:
        run.store.create(layout.job_spec(run.id), encode(spec))
        line.commit(run.id, 0)


def _first_living(store: Bucket, clock: Clock) -> NodeRecord | None:
    """A node of the run that lives: it takes connections, or its heartbeat changes within its lease."""
    began = clock.monotonic()
    tags: dict[str, str] = {}
    while True:
        wait_s = 0.0
        for entry in store.list(layout.NODES):
            data = store.get(entry.key)
            with contextlib.suppress(CorruptRecord):
                if data is None:
                    continue
                record = decode(data, NodeRecord, entry.key)
                contact = contacts([ProbeTarget(record.node, record.address, record.port, "agent")])[0]
                if contact.ok or tags.setdefault(entry.key, entry.tag) != entry.tag:
                    return record
                if contact.why != "refused":
                    wait_s = max(wait_s, record.lease_s or LEASE_S)
        if clock.monotonic() - began > wait_s:
            return None
        time.sleep(_LOOK_S)


def _forget(bucket: Bucket, run_id: str, number: int) -> None:
    """Delete what a run has left. Not of the last one: somebody may still be reading how it ended."""
    if number > 0:
        with contextlib.suppress(GpuctlError):
            bucket.delete([entry.key for entry in bucket.list(layout.run(run_id, number))])


def _size(spec: RunSpec) -> tuple[int, int]:
    return spec.nodes_min, spec.nodes_max


def _text(spec: RunSpec) -> str:
    return f"{spec.nodes_max}" if spec.nodes_min == spec.nodes_max else f"{spec.nodes_min}:{spec.nodes_max}"
