"""The values that a shell offers when TAB is pressed: names of jobs, nodes and clusters, formats, providers.

Whatever goes wrong, nothing is offered: a line that is being typed is no place for an error, and no place to wait.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from gpuctl.cluster.agreement import ledgers
from gpuctl.cluster.storage.bucket import Bucket

_JOBS = 50
_PATIENCE_S = 1.0
_TIMEOUT_S = 2.0


def offered(metavar: str, flag: str, given: Mapping[str, Any]) -> list[str]:
    """Completions for a value that the help calls ``metavar``, of the option ``flag`` (empty: an argument). ``given``:
    what else is on the line, by the name of the verb's parameter. Empty: the shell offers files."""
    try:
        return _ask(metavar.strip("[]."), flag)(given)
    except Exception:  # noqa: BLE001 - see above
        return []


def _ask(metavar: str, flag: str) -> Callable[[Mapping[str, Any]], list[str]]:
    if flag == "--cluster" or metavar == "CLUSTER":
        return _clusters
    if flag == "--provider":
        return _providers
    if flag == "--node" or metavar == "NODE":
        return _nodes
    if metavar == "JOB":
        return _jobs
    if metavar == "STEP":
        return _steps
    words = re.split(r"\|| or |, ", metavar) if "|" in metavar else []
    return lambda _: [word for word in words if re.fullmatch(r"[a-z]+", word)]


def _clusters(_: Mapping[str, Any]) -> list[str]:
    from gpuctl.stacks.state.clusters import known_clusters

    return [cluster.name for cluster in known_clusters()]


def _providers(_: Mapping[str, Any]) -> list[str]:
    from gpuctl.stacks.catalog.provider_names import PROVIDERS

    return list(PROVIDERS)


def _jobs(given: Mapping[str, Any]) -> list[str]:
    """Names of jobs, newest first."""

    line = ledgers.queue(_store(given))
    versions = line.since(max(0, line.read().number - _JOBS))
    return [version.value for version in reversed(versions) if version.value]


def _nodes(given: Mapping[str, Any]) -> list[str]:
    from gpuctl.cluster.views.job_status import read_heartbeats

    return sorted((beat.record.node for beat in read_heartbeats(_store(given))), key=lambda name: (len(name), name))


def _steps(given: Mapping[str, Any]) -> list[str]:
    from gpuctl.cluster.checkpoints import listing
    from gpuctl.cluster.jobs import queue

    store = _store(given)
    job = queue.find(store, given.get("job")).job
    return [*(str(entry.step) for entry in listing.committed(store, job)), "last", "files"]


def _store(given: Mapping[str, Any]) -> Bucket:
    from gpuctl.cli.session.open_cluster import USED, locate
    from gpuctl.cli.settings.resolve import load
    from gpuctl.cluster.storage.bucket import open_bucket

    there = locate(load({"cluster": given.get("cluster"), "bucket": given.get("bucket")}, only=USED))
    return open_bucket(there.bucket, patience_s=_PATIENCE_S, timeout_s=_TIMEOUT_S)
