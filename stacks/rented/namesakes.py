"""Clusters of one name in one account: known by what carries the name's tag, whether a bucket tells of them or not."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gpuctl.cluster.errors import BadInput, GpuctlError
from gpuctl.cluster.storage.bucket import open_bucket
from gpuctl.cluster.views.holders import described, live_nodes, read_record
from gpuctl.stacks.clouds.answers import Leftover, Scan
from gpuctl.stacks.request.last_request import LastRequest
from gpuctl.stacks.request.stack_request import StackRequest
from gpuctl.stacks.state.clusters import KnownCluster, command


def refuse_other_account(cluster: str, noted: str, mine: str) -> None:
    """Raises ``BadInput`` if the credentials are of another account than the cluster's, where that is ``noted``: a scan
    there finds nothing, and proves nothing."""
    if noted not in ("", mine):
        raise BadInput(
            f"{cluster} is in account {noted}, but these credentials are for {mine}", "log in to that account"
        )


def refuse_attached(known: KnownCluster, last: LastRequest | None) -> None:
    """Raises ``BadInput`` if a cluster is up whose ``last`` request only another machine has."""
    if last is not None:
        return
    try:
        store = open_bucket(known.bucket)
        there = read_record(store)
        live = live_nodes(store) if there else 0
    except GpuctlError:  # what is there by its tags is looked at next
        return
    if there is not None and there.id == known.id:
        raise BadInput(
            f"{described(there, live)}, can be changed only where it was made",
            "`gpuctl status`, `train` and `down` work here; if that machine is lost:"
            f" `{command('down', known.name)}`, then `{command('up', known.name)}`",
        )


def refuse_namesake(scan: Scan, request: StackRequest, *, is_new: bool = True) -> None:
    """Raises ``BadInput`` if ``scan``, of the request's cluster, found something that is not of ``request``: a
    colleague's, or made on another machine. ``is_new``: this machine has not made the cluster before; if it has, what
    carries its name and no identity is for `down` to name."""
    others = [one for one in scan.found if one.cluster_id != request.id or not request.id]
    if not is_new:
        others = [one for one in others if one.cluster_id]
    if not others:
        return
    known = next((one for one in others if one.owner), others[0])
    who = f", made by {known.owner}" if known.owner else ""
    since = f" on {known.created}" if known.created else ""
    # Roles are in no region: those alone tell of a cluster in another one.
    where = next((f"--region {one.region}" for one in others if one.region), "--region all")
    is_here = any(one.region == request.region for one in others)
    is_away = any(one.region for one in others)
    place = request.region if is_here else f"{'another region of ' if is_away else ''}this account"
    at = request.bucket_url()
    join = at if _has_record(at, others) else "URL, that of its bucket"
    told = msgspec.structs.replace(scan, found=tuple(others)).summary()
    if not is_new:
        raise BadInput(
            f"another cluster {request.cluster} exists in {place}{who}{since}: {told}",
            "choose another name (--cluster), or have that one taken down by whoever made it",
        )
    raise BadInput(
        f"cluster {request.cluster} already exists in {place}{who}{since}: {told}",
        f"choose another name (--cluster), or use that one (gpuctl attach {join}), or remove it (gpuctl"
        f" down --by-tag {known.cluster_id or request.cluster} --provider {request.provider} {where})",
    )


def _has_record(url: str, others: Sequence[Leftover]) -> bool:
    """Whether the bucket is that of one of ``others``: its owner may have chosen another."""
    try:
        there = read_record(open_bucket(url, patience_s=0.0))
    except GpuctlError:
        return False
    return there is not None and there.id in {one.cluster_id for one in others}
