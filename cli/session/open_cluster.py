"""Opening the cluster that the settings name."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from gpuctl.cli.settings.resolve import Settings, load
from gpuctl.cluster.errors import BadInput
from gpuctl.cluster.storage.bucket import Bucket, open_bucket
from gpuctl.cluster.storage.bucket_names import folder_of
from gpuctl.stacks.state import clusters
from gpuctl.stacks.state.clusters import KnownCluster

USED = ("cluster", "bucket")
"""Settings that lead to a cluster."""


@dataclass(frozen=True, slots=True)
class OpenCluster:
    """A cluster with its bucket opened."""

    cluster: KnownCluster
    store: Bucket

    def why_ended(self) -> str:
        """What has become of nodes on this machine that have ended, and what brings them back; empty if none has."""
        if self.cluster.provider != "local":
            return ""
        from gpuctl.stacks.providers import local_nodes  # psutil is nothing for verbs that only read

        return local_nodes.why_ended(self.cluster.name)


def reach(name: str | None, bucket: str | None = None) -> OpenCluster:
    """The cluster that the flags ``--cluster`` and ``--bucket`` and the other settings name.

    Raises ``BadInput`` if this machine knows none of that name and no bucket is given.
    """
    return reach_with(load({"cluster": name, "bucket": bucket}, only=USED))


def reach_with(settings: Settings) -> OpenCluster:
    cluster = locate(settings)
    refuse_missing_folder(cluster.bucket)
    return OpenCluster(cluster, open_bucket(cluster.bucket))


def locate(settings: Settings) -> KnownCluster:
    """Find the cluster that the settings name, without a look at it. Raises ``BadInput``."""
    elsewhere = KnownCluster(name=settings.cluster, provider="", bucket=settings.bucket or "")
    if settings.bucket and settings.found["bucket"].source == "flag":
        return elsewhere
    try:
        return clusters.find(settings.cluster)
    except BadInput:
        if settings.bucket:
            return elsewhere
        raise


def refuse_missing_folder(url: str) -> None:
    """Opening a folder as a bucket would make it: right for ``up``, and wrong for whoever looks for something."""
    if urlsplit(url).scheme == "file" and not (folder := folder_of(url)).is_dir():
        raise BadInput(f"folder {folder} does not exist", "check --bucket, or run `gpuctl up`")
