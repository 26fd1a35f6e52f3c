"""Jobs as the user's machine sees them: put one in line, ask for its end, learn how it ended. Nothing is printed here.

The line is a ledger whose version n holds the id of job number n, so two people who submit at the same moment get two
numbers. The spec is written before the version that makes it known: an agent that sees the id finds the spec.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import PurePath
from typing import Protocol

from msgspec.structs import replace

from gpuctl.cluster import layout
from gpuctl.cluster.bucket import Store
from gpuctl.cluster.errors import BadInput, GpuctlError, StoreUnavailable
from gpuctl.cluster.ledger import Ledger, Version
from gpuctl.cluster.records import ClusterSpec, JobSpec, Outcome, Round, decode, encode

_TRIES = 20
_SAME_NUMBER = " bcdefgh"
"""Suffixes of an id whose name is taken though its number is not (a submitter that died, or is just about to win)."""


class _Located(Protocol):
    @property
    def url(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Request:
    """What ``gpuctl train`` asks for; ``submit`` makes a ``JobSpec`` of it."""

    script: str
    """Path below the packed folder, with forward slashes."""
    args: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    code: str = ""
    nodes: tuple[int, int] | None = None
    """Fewest and most nodes; ``None``: those of the cluster."""
    nproc: int | None = None
    max_restarts: int = 0
    image: str = ""
    submitted_by: str = ""


class JobFailed(GpuctlError):
    """A job ended other than well. ``exit_code`` is that of the rank to blame, so that a shell sees it."""

    def __init__(self, job: str, outcome: Outcome) -> None:
        what = f"job {job} was cancelled" if outcome.result == "cancelled" else f"job {job} failed: {outcome.message}"
        super().__init__(what, f"all it printed: gpuctl logs {job}")
        self.exit_code = outcome.exit_code or 1


def queue(store: Store) -> Ledger[str]:
    """The line: version n is the id of job number n. All versions are kept."""
    return Ledger(store, layout.QUEUE, str, keep=None)


def rounds(store: Store, job: str) -> Ledger[Round]:
    return Ledger(store, layout.rounds(job), Round, keep=256)


def cluster_spec(store: Store) -> ClusterSpec:
    """Raises ``BadInput`` where there is no cluster."""
    data = store.get(layout.CLUSTER)
    if data is None:
        raise BadInput("there is no cluster in this bucket", "make one with `gpuctl up`")
    return decode(data, ClusterSpec, layout.CLUSTER)


def check_nodes(cluster: ClusterSpec, nodes: tuple[int, int] | None) -> tuple[int, int]:
    """The nodes a job gets. Raises ``BadInput`` if it wants more than the cluster can ever have."""
    if nodes is None:
        return cluster.nodes_min, cluster.nodes_max
    if nodes[1] > cluster.nodes_max:
        raise BadInput(
            f"the job wants {nodes[1]} nodes and cluster {cluster.name} has at most {cluster.nodes_max}",
            f"use --nodes {cluster.nodes_max} or fewer, or make a larger cluster",
        )
    return nodes


def submit(store: Store, cluster: ClusterSpec, request: Request) -> JobSpec:
    """Put a job in line.

    Raises ``BadInput`` (more nodes than there are), ``StoreUnavailable`` (it may or may not be in line: see ``jobs``).
    """
    nodes_min, nodes_max = check_nodes(cluster, request.nodes)
    line = queue(store)
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
        image=request.image,
        submitted_at=time.time(),
        submitted_by=request.submitted_by,
    )
    for _ in range(_TRIES):
        number = line.read().number + 1
        spec = _claim_name(store, replace(draft, number=number))
        if _commit(line, spec):
            return spec
        store.delete([layout.job_spec(spec.job)])
    raise StoreUnavailable("others were quicker each time the job was about to get in line", "try again")


def newest(store: Store) -> str | None:
    """Id of the job that was submitted last."""
    return queue(store).read().value


def find(store: Store, job: str | None) -> JobSpec:
    """The spec of ``job``, or of the newest one. Raises ``BadInput`` naming the last jobs if there is none."""
    name = job or newest(store)
    if name is None:
        raise BadInput("no job has been started on this cluster", "start one with `gpuctl train script.py`")
    data = store.get(layout.job_spec(name)) if _is_id(name) else None
    if data is None:
        last = queue(store).read().number
        known = [str(version.value) for version in queue(store).since(max(0, last - 5))]
        hint = f"the last ones: {', '.join(known)}" if known else "see `gpuctl jobs`"
        raise BadInput(f"there is no job {name!r}", hint)
    return decode(data, JobSpec, layout.job_spec(name))


def ask_to_cancel(store: Store, job: str) -> None:
    """Rank 0 sees it, lets the workers write a last checkpoint and ends the job."""
    store.create(layout.cancel(job), b"{}")


def end_as_cancelled(store: Store, job: str, message: str) -> bool:
    """Decide the end without rank 0, for a cluster that is about to be taken away; ``False`` if it had ended."""
    ledger = rounds(store, job)
    outcome = Outcome(result="cancelled", exit_code=130, message=message)
    for _ in range(_TRIES):
        current = ledger.read()
        base = current.value or Round(job=job, number=0, phase="wait", epoch=0)
        if base.phase == "ended":
            return False
        ended = replace(base, phase="ended", outcome=outcome, at=time.time())
        if ledger.commit(ended, current.number):
            return True
    raise StoreUnavailable(f"job {job} kept changing while it was being ended", "try again")


def outcome(store: Store, job: str) -> Outcome | None:
    """How the job ended; ``None`` while it has not."""
    return outcome_of(rounds(store, job).read())


def outcome_of(version: Version[Round]) -> Outcome | None:
    current = version.value
    if current is None or current.phase != "ended":
        return None
    return current.outcome or Outcome(result="failed", exit_code=1, message="ended without a word")


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
