"""Jobs as the user's machine sees them: put one in line, ask for its end, learn how it ended. Nothing is printed here.

The line is a ledger whose version n holds the id of job number n, so two people who submit at the same moment get two
numbers. The spec is written before the version that makes it known: an agent that sees the id finds the spec.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePath
from typing import Protocol

from msgspec.structs import replace

from gpuctl.cluster import layout
from gpuctl.cluster.agreement import ledgers
from gpuctl.cluster.agreement.ledger import Ledger, Version
from gpuctl.cluster.errors import BadInput, CorruptRecord, GpuctlError, StoreUnavailable
from gpuctl.cluster.records.clusters import ClusterSpec
from gpuctl.cluster.records.codec import decode, encode
from gpuctl.cluster.records.environments import EnvironmentSource
from gpuctl.cluster.records.jobs import CancelRequest, JobSpec
from gpuctl.cluster.records.rounds import JobOutcome, Round
from gpuctl.cluster.retry import ATTEMPTS
from gpuctl.cluster.storage.interface import Store

_LOOKED_AT = 50
_SAME_NUMBER = " bcdefgh"
"""Suffixes of an id whose name is taken though its number is not (a submitter that died, or is just about to win)."""


class _Located(Protocol):
    @property
    def url(self) -> str: ...


@dataclass(frozen=True, slots=True)
class JobRequest:
    """A job as ``gpuctl train`` asks for it; ``submit`` makes a ``JobSpec`` of it."""

    script: str
    """Path below the packed folder, with forward slashes."""
    args: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    code: str = ""
    nodes: tuple[int, int] | None = None
    """Fewest and most nodes; ``None``: those of the cluster."""
    nproc: int | None = None
    max_restarts: int = 0
    exit_timeout_s: float = 60.0
    image: str = ""
    environment: EnvironmentSource | None = None
    launcher: str = "torchrun"
    strategy: str = ""
    allow_tcp: bool = False
    submitted_by: str = ""


class JobFailed(GpuctlError):
    """A job failed. ``exit_code`` is that of the rank to blame, so that a shell sees it."""

    def __init__(self, job: str, outcome: JobOutcome) -> None:
        what = f"job {job} was cancelled" if outcome.result == "cancelled" else f"job {job} failed: {outcome.message}"
        super().__init__(what, "; ".join(filter(None, (outcome.hint, f"see its output: gpuctl logs {job}"))))
        self.exit_code = outcome.exit_code or 1


def cluster_spec(store: Store) -> ClusterSpec:
    """Raises ``BadInput`` where there is no cluster."""
    data = store.get(layout.CLUSTER)
    if data is None:
        raise BadInput("there is no cluster in this bucket", "create one with `gpuctl up`")
    return decode(data, ClusterSpec, layout.CLUSTER)


def check_nodes(cluster: ClusterSpec, nodes: tuple[int, int] | None) -> tuple[int, int]:
    """The nodes a job gets. Raises ``BadInput`` if it wants more than the cluster can ever have."""
    if nodes is None:
        return cluster.nodes_min, cluster.nodes_max
    if nodes[1] > cluster.nodes_max:
        raise BadInput(
            f"the job needs {nodes[1]} nodes, but cluster {cluster.name} has at most {cluster.nodes_max}",
            f"use --nodes {cluster.nodes_max} or fewer, or create a larger cluster",
        )
    return nodes


def submit(store: Store, cluster: ClusterSpec, request: JobRequest) -> JobSpec:
    """Put a job in line.

    Raises ``BadInput`` (more nodes than there are), ``StoreUnavailable`` (it may or may not be in line: see ``jobs``).
    """
    nodes_min, nodes_max = check_nodes(cluster, request.nodes)
    line = ledgers.queue(store)
    draft = JobSpec(
        job="",
        number=0,
        script=request.script,
        args=request.args,
        env=dict(request.env),
        code=request.code,
        nodes_min=nodes_min,
        nodes_max=nodes_max,
        nproc=request.nproc,
        max_restarts=request.max_restarts,
        exit_timeout_s=request.exit_timeout_s,
        image=request.image,
        environment=request.environment,
        launcher=request.launcher,
        strategy=request.strategy,
        allow_tcp=request.allow_tcp,
        submitted_at=time.time(),
        submitted_by=request.submitted_by,
    )
    for _ in range(ATTEMPTS):
        number = line.read().number + 1
        spec = _claim_name(store, replace(draft, number=number))
        if _commit(line, spec):
            return spec
        store.delete([layout.job_spec(spec.job)])
    raise StoreUnavailable("other submissions won every attempt to queue the job", "try again")


def newest(store: Store) -> str | None:
    """Id of the job that was submitted last."""
    return ledgers.queue(store).read().value


def find(store: Store, job: str | None) -> JobSpec:
    """The spec of ``job``; ``None``: of the newest one. Raises ``BadInput`` naming the last jobs if there is none."""
    name = newest(store) if job is None else job
    if name is None:
        raise BadInput("no job has been started on this cluster", "start one with `gpuctl train script.py`")
    data = store.get(layout.job_spec(name)) if _is_id(name) else None
    if data is None:
        last = ledgers.queue(store).read().number
        known = [str(version.value) for version in ledgers.queue(store).since(max(0, last - 5))]
        hint = f"the last ones: {', '.join(known)}" if known else "see `gpuctl jobs`"
        raise BadInput(f"unknown job {name!r}", hint)
    return decode(data, JobSpec, layout.job_spec(name))


def find_with(store: Store, job: str | None, has: Callable[[str], object]) -> JobSpec:
    """Like ``find``, but where none is named: of the last ``_LOOKED_AT`` jobs, the newest that ``has`` what is wanted;
    the newest of all if none does."""
    if job is None:
        line = ledgers.queue(store)
        last = line.since(max(0, line.read().number - _LOOKED_AT))
        job = next((version.value for version in reversed(last) if version.value and has(version.value)), None)
    return find(store, job)


def ask_to_cancel(store: Store, job: str, *, now: bool = False) -> None:
    """Rank 0 sees it, lets the workers write a last checkpoint and ends the job; ``now``: ends it without one, also if
    it was asked for one before."""
    if now:
        store.put(layout.cancel(job), encode(CancelRequest(now=True)))
    else:
        store.create(layout.cancel(job), encode(CancelRequest()))


def cancel_request(store: Store, job: str) -> CancelRequest | None:
    """What was asked for; ``None``: nobody wants the job to end."""
    data = store.get(layout.cancel(job))
    if data is None:
        return None
    try:
        return decode(data, CancelRequest, layout.cancel(job))
    except CorruptRecord:
        return CancelRequest()


def end_as_cancelled(store: Store, job: str, message: str) -> bool:
    """Decide the end without rank 0, for a cluster that is about to be taken away; ``False`` if it had ended."""
    return _end(store, job, JobOutcome(result="cancelled", exit_code=130, message=message))


def end_as_failed(store: Store, job: str, message: str, hint: str = "") -> bool:
    """Decide the end of a job that can never run, whoever leads; ``False`` if it had ended."""
    return _end(store, job, JobOutcome(result="failed", exit_code=1, message=message, hint=hint))


def _end(store: Store, job: str, outcome: JobOutcome) -> bool:
    def ended(current: Round | None) -> Round | None:
        current = current or Round(job=job, number=0, phase="wait", epoch=0)
        return None if current.phase == "ended" else replace(current, phase="ended", outcome=outcome, at=time.time())

    _, end = ledgers.rounds(store, job).update(ended, f"job {job} kept changing while it was being ended")
    return end is not None


def outcome(store: Store, job: str) -> JobOutcome | None:
    """How the job ended; ``None`` while it has not."""
    return outcome_of(ledgers.rounds(store, job).read())


def outcome_of(version: Version[Round]) -> JobOutcome | None:
    current = version.value
    if current is None or current.phase != "ended":
        return None
    return outcome_of_last(current)


def outcome_of_last(ended: Round) -> JobOutcome:
    """The outcome that a job's last round, whose phase is ``ended``, has."""
    return ended.outcome or JobOutcome(result="failed", exit_code=1, message="exited without reporting")


def poll_s(store: _Located) -> float:
    """Seconds between two looks: a folder costs nothing, a request to a cloud does."""
    return 0.25 if store.url.startswith("file:") else 1.0


def stem(script: str) -> str:
    """The part of a job's id that comes from its script: lower-case letters, digits, dashes.

    >>> stem("src/Train_GPT.py")
    'train-gpt'
    """
    return re.sub(r"[^a-z0-9]+", "-", PurePath(script).stem.lower()).strip("-")[:40].strip("-") or "job"


def _claim_name(store: Store, draft: JobSpec) -> JobSpec:
    """Write the spec under a name that nobody has. It is ours alone, so it may be deleted if the number is lost."""
    for suffix in _SAME_NUMBER:
        spec = replace(draft, job=f"{stem(draft.script)}-{draft.number}{suffix.strip()}")
        key, data = layout.job_spec(spec.job), encode(spec)
        # A retry inside the client may report our own put as another's, so an identical spec is taken for ours.
        if store.create(key, data) or store.get(key) == data:
            return spec
    raise StoreUnavailable(f"all names for job number {draft.number} are taken", "try again")


def _commit(line: Ledger[str], spec: JobSpec) -> bool:
    try:
        return line.commit(spec.job, spec.number - 1)
    except StoreUnavailable:
        if any(version.value == spec.job for version in line.since(spec.number - 1)):
            return True
        raise


def _is_id(name: str) -> bool:
    return re.fullmatch(r"[a-z0-9][a-z0-9-]*", name) is not None
