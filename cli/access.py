"""From settings to an open cluster."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from gpuctl.cli.settings import Settings, load
from gpuctl.cluster.bucket import Bucket, open_bucket
from gpuctl.cluster.errors import BadInput
from gpuctl.stacks import known
from gpuctl.stacks.known import KnownCluster


@dataclass(frozen=True, slots=True)
class Access:
    """A cluster, and its bucket opened."""

    cluster: KnownCluster
    store: Bucket


def reach(name: str | None, bucket: str | None = None) -> Access:
    """The cluster that the flags ``--cluster`` and ``--bucket`` and the other settings name.

    Raises ``BadInput`` if this machine knows none of that name and no bucket is given.
    """
    return reach_with(load({"cluster": name, "bucket": bucket}))


def reach_with(settings: Settings) -> Access:
    cluster = _locate(settings)
    _refuse_missing_folder(cluster.bucket)
    return Access(cluster, open_bucket(cluster.bucket))


def _locate(settings: Settings) -> KnownCluster:
    elsewhere = KnownCluster(name=settings.cluster, provider="", bucket=settings.bucket or "")
    if settings.bucket and settings.found["bucket"].source == "flag":
        return elsewhere
    try:
        return known.find(settings.cluster)
    except BadInput:
        if settings.bucket:
            return elsewhere
        raise


def _refuse_missing_folder(url: str) -> None:
    """Opening a folder as a bucket would make it: right for ``up``, and wrong for whoever looks for something."""
    parts = urlsplit(url)
    if parts.scheme == "file" and not Path(unquote(parts.path)).is_dir():
        raise BadInput(f"there is no folder {unquote(parts.path)}", "check --bucket, or run `gpuctl up`")
