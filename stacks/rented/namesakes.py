"""Clusters of one name in one account: known by what carries the name's tag, whether a bucket tells of them or not."""

from __future__ import annotations

import msgspec

from gpuctl.cluster.errors import BadInput
from gpuctl.stacks.clouds.answers import Scan
from gpuctl.stacks.request.stack_request import StackRequest


def refuse_other_account(cluster: str, noted: str, mine: str) -> None:
    """Raises ``BadInput`` if the credentials are of another account than the cluster's, where that is ``noted``: a scan
    there finds nothing, and proves nothing."""
    if noted not in ("", mine):
        raise BadInput(
            f"{cluster} is in account {noted}, but these credentials are for {mine}", "log in to that account"
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
    join = request.bucket_url() if is_here else "URL, that of its bucket"
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
