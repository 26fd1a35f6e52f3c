"""The record of a cluster in its bucket: whose it is, agreed on by all who use it, and deleted with the cluster.

A name can be chosen twice, and a bucket's URL be given to two clusters. So a record (``cluster.json``) has an identity,
and whoever does not know that identity is a stranger to it. A stranger is refused, and told who is there and how to
join on purpose. What an older gpuctl has written has no identity; there the name and the heartbeats must do.
"""

from __future__ import annotations

import getpass
import platform
import secrets
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from urllib.parse import unquote, urlsplit, urlunsplit

from msgspec.structs import replace

from gpuctl.cluster import layout
from gpuctl.cluster.errors import BadInput, GpuctlError
from gpuctl.cluster.records.clusters import ClusterSpec
from gpuctl.cluster.records.codec import decode, encode
from gpuctl.cluster.storage.bucket import Bucket, open_bucket
from gpuctl.cluster.storage.error_mapping import shown, to_reopen
from gpuctl.cluster.views import job_status, usage
from gpuctl.stacks.providers.interface import UpRequest
from gpuctl.stacks.request.stack_request import new_cluster_id
from gpuctl.stacks.state import clusters
from gpuctl.stacks.state.clusters import KnownCluster

_BEING_MADE_S = 900.0
"""A record so young may be of a cluster whose machines still boot: no heartbeat says nothing yet."""
_QUIET_S = 60.0
"""A node is not counted as live once it was silent for so long."""


def me() -> str:
    """``user@host``, for a record's ``owner``."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user id without an entry, as in a container
        user = "unknown"
    return f"{user}@{platform.node().partition('.')[0] or 'unknown'}"


def meet(bucket: Bucket, asked: ClusterSpec) -> ClusterSpec | None:
    """The record that is in ``bucket``: that of ``asked``'s own cluster, or one that is left of a namesake that is gone
    (its id is another). ``None`` if there is none. Raises ``BadInput`` for a stranger's."""
    there = read_record(bucket)
    if there is None or there.id != asked.id:
        _refuse_to_nest(bucket, asked)
    if there is not None and there.id != asked.id:
        now = _now_by(bucket)
        refuse_strangers(there, asked, live_nodes(bucket, now), bucket.url, age_s=now - there.created_at)
    return there


def refuse_strangers(
    there: ClusterSpec | None, asked: ClusterSpec, live: int, url: str, *, age_s: float = float("inf")
) -> None:
    """Refuse a bucket's record that is another cluster's and may be in use.

    Args:
        there: the record; ``None``: there is none.
        asked: the cluster that would use the bucket.
        live: how many nodes of ``there`` are live, machines that only boot among them, where the caller knows of such.
        url: of the bucket, for the message.
        age_s: seconds since the record was made; infinite: it counts as old.

    Raises ``BadInput`` if the record ``there`` at ``url`` is not of the cluster ``asked``, as its id tells, and may be
    in use: it has another name, or ``live`` nodes, or was made ``age_s`` seconds ago and so may be about to have some.
    """
    if there is None or (there.id == asked.id and there.name == asked.name):
        return
    if there.name == asked.name and not live and (not there.id or age_s > _BEING_MADE_S):
        return
    join = f"to join it: gpuctl attach {to_reopen(url)}"
    own = (
        f"for a cluster of your own: another --bucket, such as {_beside(url, asked.name)}"
        if there.name != asked.name
        else "for a cluster of your own: another --cluster name or --bucket"
    )
    raise BadInput(f"{to_reopen(url)} holds {described(there, live)}", f"{join}; {own}")


def _refuse_to_nest(bucket: Bucket, asked: ClusterSpec) -> None:
    """Raises ``BadInput`` if a prefix above is a cluster's: its nodes may write to all that is below."""
    parts = urlsplit(bucket.url)
    path = "" if parts.scheme == "file" else parts.path.strip("/")
    while path:
        path = path.rpartition("/")[0]
        above = urlunsplit(parts._replace(path=f"/{path}"))
        try:
            there = read_record(open_bucket(above, patience_s=0.0))
        except GpuctlError:  # not for us to read, or no record of ours
            continue
        if there is not None:
            raise BadInput(
                f"{to_reopen(bucket.url)} is below {to_reopen(above)}, which is cluster {there.name!r}",
                f"use another --bucket, such as {_beside(above, asked.name)}",
            )


def clusters_below(keys: Iterable[str]) -> list[str]:
    """Prefixes among ``keys`` of a bucket, or of a cluster's part of one, that other clusters have there."""
    split = (key.rpartition("/") for key in keys)
    return sorted(folder for folder, _, name in split if folder and name == layout.CLUSTER)


def described(there: ClusterSpec, live: int) -> str:
    """A cluster in a line: "cluster 'a' of kim@lab, since 2026-11-22 17:10 UTC, 2 nodes live"."""
    since = time.strftime("%Y-%m-%d %H:%M", time.gmtime(there.created_at))
    told = [
        f"cluster {there.name!r}" + (f" of {printable(there.owner)}" if there.owner else ""),
        f"since {since} UTC" if there.created_at else "",
        f"{live} node{'' if live == 1 else 's'} live" if live else "no node live",
    ]
    return ", ".join(filter(None, told))


def printable(text: str) -> str:
    """Somebody else wrote it: a terminal is not to obey it."""
    return "".join(char if char.isprintable() else "?" for char in text)


def read_record(bucket: Bucket) -> ClusterSpec | None:
    """Read the record of the cluster's owner. Raises ``CorruptRecord``."""
    data = bucket.get(layout.CLUSTER)
    return None if data is None else decode(data, ClusterSpec, layout.CLUSTER)


def live_nodes(bucket: Bucket, now: float | None = None) -> int:
    """The number of nodes that have been heard of lately. ``now``: the time by the store's clock; asked for if not
    given."""
    beats = job_status.read_heartbeats(bucket)
    if not beats:
        return 0
    at = _now_by(bucket) if now is None else now
    return sum(at - beat.seen_at < _QUIET_S for beat in beats)


def _now_by(bucket: Bucket) -> float:
    """The store's clock, which dates the heartbeats: this machine's may be minutes off."""
    key = f"probe/{uuid.uuid4().hex}"
    bucket.put(key, b"")
    try:
        return max((entry.modified for entry in bucket.list("probe") if entry.key == key), default=time.time())
    finally:
        bucket.delete([key])


def _beside(url: str, name: str) -> str:
    """Not below: the nodes of the one that is there may write there, and its end would take that along."""
    parts = urlsplit(to_reopen(url))
    above = parts.path.rstrip("/").rpartition("/")[0]
    return urlunsplit(parts._replace(path=f"{above}/{name}"))


# -- agreed on, and forgotten ------------------------------------------------------------------------------------------


def bucket_of(request: UpRequest, usual: str = "") -> str:
    """URL of the cluster's bucket: where it is already, else what is asked for, else ``usual``. Raises ``BadInput`` if
    the cluster is at another one: its jobs and nodes would be out of reach there."""
    there = clusters.get(request.name)
    if there is None:
        return request.bucket or usual
    if request.bucket and place(request.bucket) != place(there.bucket):
        raise BadInput(
            f"cluster {there.name!r} has its bucket at {shown(there.bucket)}, not {shown(request.bucket)}",
            "leave --bucket out, or run `gpuctl down` first, or choose another name with --cluster",
        )
    return request.bucket or there.bucket


def place(url: str) -> tuple[str, str, str]:
    """The parts that a cluster's bucket is known by, however its URL is written: the options change with its keys."""
    parts = urlsplit(url)
    return parts.scheme, parts.netloc, unquote(parts.path).strip("/")


def settle(bucket: Bucket, request: UpRequest, first: ClusterSpec) -> ClusterSpec:
    """The record of the cluster that ``request`` is about, agreed with whatever is in ``bucket``, and noted among the
    known ones. ``first``: what a new cluster is where nothing is said.

    Raises ``BadInput`` if the record there is another cluster's, or says something else of what may not change: all
    but the number of nodes.
    """
    noted, there = clusters.get(request.name), read_record(bucket)
    identity = noted.id or (there.id if there else "") if noted else new_cluster_id()
    ours = there if there is not None and (there.name, there.id) == (request.name, identity) and noted else None
    start = ours or replace(first, id=identity, owner=me(), token=secrets.token_hex(16), created_at=time.time())
    said = {name: getattr(request, name) for name in ("nodes_min", "nodes_max", "slots", "stall_minutes")}
    asked = replace(start, **{name: value for name, value in said.items() if value is not None})
    if meet(bucket, asked) is not None and ours is None:
        forget_nodes(bucket)  # of a namesake that is gone
    created = noted.created_at if noted else time.time()
    hosts = request.hosts or (noted.hosts if noted else ())
    clusters.remember(
        KnownCluster(
            name=asked.name, provider=asked.provider, bucket=bucket.url, id=asked.id, hosts=hosts, created_at=created
        )
    )
    words = {"provider": "provider", "slots": "slots", "stall_minutes": "stall-minutes"}
    agreed = agree_on_spec(bucket, asked, {word: _field(name) for name, word in words.items()})
    if (agreed.nodes_min, agreed.nodes_max) != (asked.nodes_min, asked.nodes_max):
        agreed = replace(agreed, nodes_min=asked.nodes_min, nodes_max=asked.nodes_max)
        bucket.put(layout.CLUSTER, encode(agreed))
    return agreed


def _field(name: str) -> Callable[[ClusterSpec], object]:
    return lambda spec: getattr(spec, name)


def _shown(value: object) -> str:
    return "default" if value is None else str(value)


def agree_on_spec(
    bucket: Bucket, asked: ClusterSpec, fixed: Mapping[str, Callable[[ClusterSpec], object]]
) -> ClusterSpec:
    """The cluster's record: ``asked`` itself, or the one that is there already. Raises ``BadInput`` if that is another
    cluster's (see ``ownership``), and where something of that which is ``fixed``, by what to call it, is another in the
    two."""
    if bucket.create(layout.CLUSTER, encode(asked)):
        return asked
    there = decode(bucket.get(layout.CLUSTER) or b"", ClusterSpec, layout.CLUSTER)
    if there.id != asked.id:  # somebody was quicker, after all that was looked at before
        refuse_strangers(there, asked, live_nodes(bucket), bucket.url)
    for what, of in fixed.items():
        if of(there) != of(asked):
            raise BadInput(
                f"cluster {there.name!r} exists with {what}={_shown(of(there))}, not {_shown(of(asked))}",
                "run `gpuctl down` first, or choose another name with --cluster",
            )
    return there


def forget_nodes(bucket: Bucket, of: str | None = None) -> None:
    """Delete the records of a removed cluster: what its machines reported, and last of all the cluster's own record.
    How long each was there stays. ``of``: the identity of the one that is gone; if the record is another cluster's by
    now, all of it stays."""
    there = read_record(bucket) if of is not None else None
    if there is not None and there.id != of:
        return
    usage.note(bucket)
    for prefix in (layout.NODES, layout.NETWORKS, layout.RANK0, layout.BOOT):
        bucket.delete([entry.key for entry in bucket.list(prefix)])
    bucket.delete([layout.CLUSTER])
