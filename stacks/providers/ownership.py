"""The record of a cluster in its bucket: whose it is, agreed on by all who use it, and deleted with the cluster.

A name can be chosen twice, and a bucket's URL be given to two clusters. So a record (``cluster.json``) has an identity,
and whoever does not know that identity is a stranger to it. A stranger is refused, and told who is there and how to
join on purpose; so is one at a prefix above or below, and one who meets what another owner's cluster has left
(``past.json``). What an older gpuctl has written has no identity; there the name and the heartbeats must do.
"""

from __future__ import annotations

import getpass
import platform
import re
import secrets
import shlex
import time
from collections.abc import Callable, Mapping
from urllib.parse import parse_qsl, unquote, urlsplit, urlunsplit

from msgspec.structs import replace

from gpuctl.cluster import layout
from gpuctl.cluster.errors import BadInput, GpuctlError
from gpuctl.cluster.records.clusters import ClusterSpec, PastCluster
from gpuctl.cluster.records.codec import decode, encode
from gpuctl.cluster.storage.bucket import Bucket, open_bucket
from gpuctl.cluster.storage.error_mapping import to_reopen
from gpuctl.cluster.views import usage
from gpuctl.cluster.views.holders import (
    Holder,
    described,
    holders_above,
    holders_below,
    live_nodes,
    now_by,
    printable,
    read_past,
    read_record,
)
from gpuctl.stacks.providers.interface import Say, UpRequest
from gpuctl.stacks.request.stack_request import new_cluster_id
from gpuctl.stacks.state import clusters
from gpuctl.stacks.state.clusters import KnownCluster
from gpuctl.stacks.state.paths import state_dir

_BEING_MADE_S = 900.0
"""A record so young may be of a cluster whose machines still boot: no heartbeat says nothing yet."""


def me() -> str:
    """``user@host``, for a record's ``owner``."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user id without an entry, as in a container
        user = "unknown"
    return f"{user}@{platform.node().partition('.')[0] or 'unknown'}"


def is_me(owner: str) -> bool:
    """Whether ``owner`` is this user, also as a label of Google Cloud has it, which takes few characters."""
    as_label = [re.sub(r"[^a-z0-9_-]", "_", one.lower())[:63] for one in (owner, me())]
    return as_label[0] == as_label[1]


def meet(bucket: Bucket, asked: ClusterSpec, say: Say = lambda _: None) -> ClusterSpec | None:
    """The record that is in ``bucket``: that of ``asked``'s own cluster, or one that is left of another of the same
    owner's that is gone, which ``say`` is told; ``None`` if there is none. Raises ``BadInput`` if the bucket, or what
    is in it, is another's."""
    there = read_record(bucket)
    if there is not None and (there.id, there.name) == (asked.id, asked.name):
        return there
    _refuse_neighbours(bucket, asked)
    if there is None:
        _refuse_past(bucket, asked, say)
        return None
    now = now_by(bucket)
    refuse_strangers(there, asked, live_nodes(bucket, now), bucket, age_s=now - there.created_at)
    say(f"taking over {to_reopen(bucket.url)} from {described(there, 0)}")
    return there


def refuse_strangers(there: ClusterSpec, asked: ClusterSpec, live: int, bucket: Bucket, *, age_s: float) -> None:
    """Refuse a bucket's record that is another cluster's.

    Args:
        there: the record.
        asked: the cluster that would use the bucket.
        live: how many nodes of ``there`` are live.
        bucket: that has the record.
        age_s: seconds since the record was made.

    Raises ``BadInput`` but where a crash has left the record: of the same owner and name, no node is live, and it is
    older than machines take to boot.
    """
    is_left = there.name == asked.name and not live and _is_mine(there, bucket, asked)
    if is_left and (age_s > _BEING_MADE_S or not there.id):
        return
    raise _refusal(there, asked, live, bucket)


def _refusal(there: ClusterSpec, asked: ClusterSpec, live: int, bucket: Bucket) -> BadInput:
    join = f"to join it: gpuctl attach {to_reopen(bucket.url)}"
    remove = (
        "" if live else f", and to remove it, gpuctl down --cluster {shlex.quote(printable(there.name))} after that"
    )
    return BadInput(
        f"{to_reopen(bucket.url)} holds {described(there, live)}", f"{join}{remove}; {_elsewhere(there, asked, bucket)}"
    )


def _refuse_past(bucket: Bucket, asked: ClusterSpec, say: Say) -> None:
    """Raises ``BadInput`` if another owner's cluster has left its jobs and checkpoints: the next ``down
    --delete-checkpoints`` would delete them. ``say`` is told of one's own."""
    there, noted = read_past(bucket), clusters.get(asked.name)
    if there is None or there.id == asked.id:
        return
    if noted is not None and noted.id == there.id:  # attached: from now on they are this owner's
        bucket.put(layout.PAST, encode(replace(there, owner=asked.owner)))
        return
    held = f"{to_reopen(bucket.url)} holds {described(there)}"
    if not _is_mine(there, bucket, asked):
        attach = f"to go on with them: gpuctl attach {to_reopen(bucket.url)}"
        raise BadInput(held, f"{attach}; {_elsewhere(there, asked, bucket)}")
    if there.name != asked.name:
        say(held)


def _is_mine(there: Holder, bucket: Bucket, asked: ClusterSpec) -> bool:
    """Whether the owner of ``asked`` made it. Machines are renamed, but nobody else has a bucket in this user's state
    folder; what has no identity is of a time before owners."""
    return there.owner == asked.owner or not there.id or bucket.url.startswith(f"{state_dir().as_uri()}/")


def _elsewhere(there: Holder, asked: ClusterSpec, bucket: Bucket) -> str:
    if there.name == asked.name:
        return "for a cluster of your own: another --cluster name or --bucket"
    return f"for a cluster of your own: another --bucket, such as {_beside(bucket.url, asked.name)}"


def _refuse_neighbours(bucket: Bucket, asked: ClusterSpec) -> None:
    """Raises ``BadInput`` if a prefix above or below is another's: nodes may write to, and an owner may delete, all
    that is below theirs."""
    here = to_reopen(bucket.url)
    hint = f"use another --bucket, such as {_beside(bucket.url, asked.name)}"
    for above, there in holders_above(bucket.url):
        if isinstance(there, ClusterSpec) or not _is_mine(there, bucket, asked):
            raise BadInput(
                f"{here} is below {to_reopen(above)}, which has {described(there, _live(above, bucket))}",
                f"use another --bucket, such as {_beside(above, asked.name)}",
            )
    try:
        entries = bucket.list("")
    except GpuctlError:
        if not bucket.url.startswith("file:"):  # some folder in it may be closed to this user, and then to its nodes
            raise
        return
    for below, one in holders_below(bucket, entries).items():
        if not isinstance(one, PastCluster) or not _is_mine(one, bucket, asked):
            what = (
                "a record that cannot be read" if one is None else described(one, _live(bucket.at(below).url, bucket))
            )
            raise BadInput(f"below {here}, {printable(below)} has {what}", hint)


def _live(url: str, bucket: Bucket) -> int | None:
    """How many nodes live at ``url``, a prefix near ``bucket``'s, whose store's clock is the same; ``None`` if that
    cannot be seen."""
    try:
        return live_nodes(open_bucket(url), now_by(bucket))
    except GpuctlError:
        return None


def _beside(url: str, name: str) -> str:
    """Not below: the nodes of the one that is there may write there, and its end would take that along."""
    parts = urlsplit(to_reopen(url))
    above = parts.path.rstrip("/").rpartition("/")[0]
    beside = parts._replace(path=f"{above}/{name}")
    return urlunsplit(beside if beside != parts else parts._replace(path=f"{above}/{name}-2"))


# -- agreed on, and forgotten ------------------------------------------------------------------------------------------


def bucket_of(request: UpRequest, usual: str = "") -> str:
    """URL of the cluster's bucket: where it is already, else what is asked for, else ``usual``. Raises ``BadInput`` if
    the cluster is at another one: its jobs and nodes would be out of reach there."""
    there = clusters.get(request.name)
    if there is None:
        return request.bucket or usual
    if request.bucket and place(request.bucket) != place(there.bucket):
        raise BadInput(
            f"cluster {there.name!r} has its bucket at {to_reopen(there.bucket)}, not {to_reopen(request.bucket)}",
            "leave --bucket out, or run `gpuctl down` first, or choose another name with --cluster",
        )
    return request.bucket or there.bucket


def place(url: str) -> tuple[str, ...]:
    """The parts that a cluster's bucket is known by, however its URL is written. Of the options, which change with its
    keys, those of accounts and servers, which may have containers or buckets of one name each."""
    parts = urlsplit(url)
    prefix = {"s3": r"aws_", "az": r"azure_(storage_)?", "gs": r"google_"}.get(parts.scheme, "")
    options = {re.sub(f"^{prefix}", "", name.lower()): value.rstrip("/") for name, value in parse_qsl(parts.query)}
    server = options.get("endpoint", options.get("endpoint_url", options.get("base_url", "")))
    return parts.scheme, parts.netloc, unquote(parts.path).strip("/"), options.get("account_name", ""), server


def settle(bucket: Bucket, request: UpRequest, first: ClusterSpec, say: Say) -> ClusterSpec:
    """The record of the cluster that ``request`` is about, agreed with whatever is in ``bucket``, and noted among the
    known ones. ``first``: what a new cluster is where nothing is said. ``say``: see ``meet``.

    Raises ``BadInput`` if the record there is another cluster's, or says something else of what may not change: all
    but the number of nodes.
    """
    noted, there = clusters.get(request.name), read_record(bucket)
    identity = noted.id or (there.id if there else "") if noted else new_cluster_id()
    ours = there if there is not None and (there.name, there.id) == (request.name, identity) and noted else None
    start = ours or replace(first, id=identity, owner=me(), token=secrets.token_hex(16), created_at=time.time())
    said = {name: getattr(request, name) for name in ("nodes_min", "nodes_max", "slots", "stall_minutes")}
    asked = replace(start, **{name: value for name, value in said.items() if value is not None})
    if (met := meet(bucket, asked, say)) is not None and ours is None:
        forget_nodes(bucket, of=met.id)
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
        raise _refusal(there, asked, live_nodes(bucket), bucket)
    for what, of in fixed.items():
        if of(there) != of(asked):
            raise BadInput(
                f"cluster {there.name!r} exists with {what}={_shown(of(there))}, not {_shown(of(asked))}",
                "run `gpuctl down` first, or choose another name with --cluster",
            )
    return there


def forget_nodes(bucket: Bucket, of: str) -> None:
    """Delete the records of a removed cluster: what its machines reported, and last of all the cluster's own record.
    How long each machine was there stays, and a note of whose the jobs and checkpoints are.

    Args:
        bucket: of the cluster.
        of: its identity; if the record is another cluster's by now, all of it stays.
    """
    there = read_record(bucket)
    if there is not None and there.id != of:
        return
    usage.note(bucket)
    prefixes = (layout.NODES, layout.NETWORKS, layout.RANK0, layout.BOOT)
    entries = [entry for prefix in prefixes for entry in bucket.list(prefix)]
    others = tuple(f"{prefix}/" for prefix in holders_below(bucket, entries))
    bucket.delete([entry.key for entry in entries if not entry.key.startswith(others)])
    if there is not None:
        past = PastCluster(
            name=there.name,
            provider=there.provider,
            id=there.id,
            owner=there.owner,
            region=there.region,
            account=there.account,
            ended_at=time.time(),
        )
        bucket.put(layout.PAST, encode(past))
        bucket.delete([layout.CLUSTER])
