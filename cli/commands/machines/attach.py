"""``gpuctl attach``: uses a cluster created on another machine."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from gpuctl.cli.render.dialog import TerminalDialog
from gpuctl.cli.render.terminal import out, say
from gpuctl.cli.session.open_cluster import refuse_missing_folder
from gpuctl.cli.settings.options import parse_flag
from gpuctl.cli.settings.resolve import cluster_name
from gpuctl.cluster import layout
from gpuctl.cluster.errors import BadInput
from gpuctl.cluster.records.clusters import ClusterSpec
from gpuctl.cluster.records.nodes import SshHost
from gpuctl.cluster.storage.bucket import Bucket, open_bucket
from gpuctl.cluster.storage.error_mapping import shown
from gpuctl.cluster.storage.record_io import read_folder
from gpuctl.cluster.views.holders import described, live_nodes, printable, read_past, read_record
from gpuctl.stacks.providers.interface import provider
from gpuctl.stacks.request import last_request
from gpuctl.stacks.state import clusters
from gpuctl.stacks.state.clusters import KnownCluster


def verb(
    bucket: Annotated[str, typer.Argument(metavar="URL", help="The cluster's bucket, as `gpuctl up` printed it.")],
) -> None:
    """Use a cluster created on another machine.

    From then on its name is known here: jobs, logs, checkpoints and logins work as where it was made, and so does
    `gpuctl down`. Its size is changed where it was made, because that takes what is noted there.

    A cluster that is down can be attached too: the next `gpuctl up` here goes on with its jobs and checkpoints.
    """
    refuse_missing_folder(bucket)
    store = open_bucket(bucket)
    record = read_record(store) or read_past(store)
    if record is None:
        raise BadInput(
            f"no cluster found at {shown(bucket)}", "give the URL with the cluster's prefix: s3://bucket/NAME"
        )
    parse_flag("the name of the cluster there", printable(record.name), cluster_name)  # somebody else wrote it
    provider(printable(record.provider), TerminalDialog()).attach(record)
    there = last_request.recalled(record.name)
    if there is not None and (there.id != record.id or there.provider != record.provider):
        raise BadInput(
            f"another cluster named {record.name} is known here, at {shown(there.bucket)}",
            "take that one down first, or use --bucket URL with each verb",
        )
    clusters.remember(
        KnownCluster(
            name=record.name,
            provider=record.provider,
            bucket=store.url,
            hosts=_hosts(store),
            created_at=(record.created_at if isinstance(record, ClusterSpec) else 0.0) or time.time(),
            id=record.id,
            region=record.region,
            account=record.account,
        )
    )
    out(f"attached to {described(record, live_nodes(store))} ({record.provider})")
    is_up = isinstance(record, ClusterSpec)
    say(f"next: gpuctl {'status' if is_up else 'up'} --cluster {record.name}")


def _hosts(store: Bucket) -> tuple[str, ...]:
    """Machines of provider ssh, as ``--hosts`` named them: `gpuctl up` goes on with these."""
    return tuple(host.target for _, host in read_folder(store, layout.HOSTS, SshHost) if not host.dropped)
