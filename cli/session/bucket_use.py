"""The content of the buckets that clusters have left, and who still uses them."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit, urlunsplit

from gpuctl.cli.render.terminal import count
from gpuctl.cluster import layout
from gpuctl.cluster.errors import GpuctlError, NoBucket
from gpuctl.cluster.storage.bucket import Bucket, open_bucket
from gpuctl.cluster.views.holders import live_nodes
from gpuctl.stacks.catalog.instance_types import CloudName
from gpuctl.stacks.clouds.answers import KeptBucket

_USD_PER_GB_MONTH = {"aws": 0.023, "gcp": 0.020, "azure": 0.018}
"""Of the usual class in the usual region, not looked up: aws.amazon.com/s3/pricing, cloud.google.com/storage/pricing,
azure.microsoft.com/pricing/details/storage/blobs."""


@dataclass(frozen=True, slots=True)
class BucketUse:
    """A bucket, and what could be read in it."""

    provider: CloudName
    bucket: KeptBucket
    objects: int | None = None
    bytes: int | None = None
    up: tuple[str, ...] = ()
    """A word for each cluster whose record is in it."""
    down: tuple[str, ...] = ()
    """Prefixes, but its own, at which clusters have left jobs and checkpoints."""
    trouble: GpuctlError | None = None
    """Why it could not be read."""

    @property
    def users(self) -> tuple[str, ...]:
        """A word for each cluster that is in it, or has left its jobs there."""
        return (*self.up, *(f"{folder} (down)" for folder in self.down))

    @property
    def usd_per_month(self) -> float | None:
        return None if self.bytes is None else self.bytes / 1e9 * _USD_PER_GB_MONTH[self.provider]


def look_into(provider: CloudName, kept: KeptBucket) -> BucketUse:
    """All of the bucket, for all of it would go: other clusters may have got a prefix there."""
    parts = urlsplit(kept.url)
    if kept.missing:
        return BucketUse(provider, kept, 0, 0)
    try:
        bucket = open_bucket(urlunsplit(parts._replace(path="")))
        entries = bucket.list("")
        records = [entry.key for entry in entries if entry.key.rpartition("/")[2] == layout.CLUSTER]
        up = tuple(_used_by(open_bucket(urlunsplit(parts._replace(path=f"/{_folder(key)}"))), key) for key in records)
    except GpuctlError as error:
        return BucketUse(provider, kept, trouble=error)
    pasts = {_folder(entry.key) for entry in entries if entry.key.rpartition("/")[2] == layout.PAST}
    down = tuple(sorted(pasts - {_folder(key) for key in records} - {parts.path.strip("/")}))
    return BucketUse(provider, kept, len(entries), sum(entry.size for entry in entries), up, down)


def used_by(provider: CloudName, kept: KeptBucket) -> tuple[str, ...]:
    """A word for each cluster that is in it, or has left its jobs there. Raises ``GpuctlError`` if it cannot be looked
    into."""
    seen = look_into(provider, kept)
    if seen.trouble is not None and not isinstance(seen.trouble, NoBucket):
        raise GpuctlError(
            f"bucket {kept.name} was not deleted, as its users are unknown: {seen.trouble.message}",
            f"if nobody uses it: gpuctl buckets rm {kept.name} -y --force --provider {provider} --region {kept.region}",
        )
    return seen.users


def _used_by(bucket: Bucket, key: str) -> str:
    live = live_nodes(bucket)
    return f"{_folder(key) or 'a cluster'} ({count(live, 'node')} live)"


def _folder(key: str) -> str:
    return key.rpartition("/")[0]
