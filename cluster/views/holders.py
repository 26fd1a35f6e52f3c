"""What a bucket tells of the clusters that are, or were, at its prefix and around it."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Iterator
from typing import TypeAlias
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from gpuctl.cluster import layout
from gpuctl.cluster.errors import CorruptRecord, GpuctlError
from gpuctl.cluster.records.clusters import ClusterSpec, PastCluster
from gpuctl.cluster.records.codec import decode
from gpuctl.cluster.storage.bucket import Bucket, open_bucket
from gpuctl.cluster.storage.interface import Entry
from gpuctl.cluster.views import job_status

Holder: TypeAlias = ClusterSpec | PastCluster
"""Who has a prefix: a cluster that is up, or one whose jobs and checkpoints are still there."""
_QUIET_S = 60.0
"""A node is not counted as live once it was silent for so long."""
_RECORDS: dict[str, type[Holder]] = {layout.CLUSTER: ClusterSpec, layout.PAST: PastCluster}
_OF_NODES = (layout.NODES, layout.NETWORKS, layout.BOOT, layout.HOSTS, layout.MACHINE_USAGE)
"""Folders of records named for a node, and a node may be called ``cluster``."""


def read_record(bucket: Bucket) -> ClusterSpec | None:
    """Read the record of the cluster's owner. Raises ``CorruptRecord``."""
    data = bucket.get(layout.CLUSTER)
    return None if data is None else decode(data, ClusterSpec, layout.CLUSTER)


def read_past(bucket: Bucket) -> PastCluster | None:
    """Read what the last cluster there has left of itself. Raises ``CorruptRecord``."""
    data = bucket.get(layout.PAST)
    return None if data is None else decode(data, PastCluster, layout.PAST)


def live_nodes(bucket: Bucket, now: float | None = None) -> int:
    """The number of nodes that have been heard of lately. ``now``: the time by the store's clock; asked for if not
    given."""
    beats = job_status.read_heartbeats(bucket)
    if not beats:
        return 0
    at = now_by(bucket) if now is None else now
    return sum(is_live(beat, at) for beat in beats)


def is_live(beat: job_status.Heartbeat, now: float) -> bool:
    """``now``: the time by the store's clock."""
    return now - beat.seen_at < _QUIET_S


def now_by(bucket: Bucket) -> float:
    """The store's clock, which dates the heartbeats: this machine's may be minutes off."""
    key = f"probe/{uuid.uuid4().hex}"
    bucket.put(key, b"")
    try:
        return max((entry.modified for entry in bucket.list("probe") if entry.key == key), default=time.time())
    finally:
        bucket.delete([key])


def holders_above(url: str) -> Iterator[tuple[str, Holder]]:
    """Who has a prefix above ``url``, the nearest first, with its URL."""
    parts = urlsplit(url)
    path = unquote(parts.path).strip("/")
    while path:
        path = path.rpartition("/")[0]
        above = urlunsplit(parts._replace(path=f"/{quote(path)}"))
        try:
            bucket = open_bucket(above, patience_s=0.0)
            there = read_record(bucket) or read_past(bucket)
        except GpuctlError:  # not for us to read, or no record of ours
            continue
        if there is not None:
            yield above, there


def holders_below(bucket: Bucket, entries: Iterable[Entry]) -> dict[str, Holder | None]:
    """Who has a prefix below ``bucket``'s, by that prefix; ``None``: whose it is cannot be read. ``entries``: those of
    the bucket that are looked at."""
    found: dict[str, Holder | None] = {}
    for entry in entries:
        folder, _, name = entry.key.rpartition("/")
        if not folder or name not in _RECORDS:
            continue
        try:
            data = bucket.get(entry.key)
            there = None if data is None else decode(data, _RECORDS[name], entry.key)
        except CorruptRecord:
            if folder in _OF_NODES:
                continue
            there = None
        if name == layout.CLUSTER or folder not in found:
            found[folder] = there
    return found


def described(there: Holder, live: int | None = None) -> str:
    """A cluster in a line: "cluster 'a' of kim@lab, since 2026-11-22 17:10 UTC, 2 nodes live". ``live``: ``None`` if
    nobody has looked."""
    named = f"cluster {there.name!r}" + (f" of {printable(there.owner)}" if there.owner else "")
    if isinstance(there, PastCluster):
        return f"the jobs and checkpoints of {named}, down since {_date(there.ended_at)}"
    told = [
        named,
        f"since {_date(there.created_at)}" if there.created_at else "",
        "" if live is None else f"{live} node{'' if live == 1 else 's'} live" if live else "no node live",
    ]
    return ", ".join(filter(None, told))


def _date(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(at))


def printable(text: str) -> str:
    """Somebody else wrote it: a terminal is not to obey it."""
    return "".join(char if char.isprintable() else "?" for char in text)
