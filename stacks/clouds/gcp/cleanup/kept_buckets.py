"""The buckets that ``down`` leaves, known by their label; deleted with all that is in them, older versions too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import quote

from gpuctl.cluster.errors import BadInput
from gpuctl.stacks.clouds.answers import KeptBucket
from gpuctl.stacks.clouds.gcp.cleanup.leaks import places
from gpuctl.stacks.clouds.gcp.client import Answer, GcpAccount, entering
from gpuctl.stacks.clouds.gcp.error_mapping import NotFound
from gpuctl.stacks.clouds.gcp.ownership import by_labels

_AT_ONCE = 16
"""Deletions under way; Cloud Storage has no request that deletes many objects."""


def buckets(regions: Sequence[str], cluster: str | None, account: GcpAccount | None = None) -> tuple[KeptBucket, ...]:
    """See ``Cloud``. Of the project; a bucket of somebody's own, which was given, is not among them."""
    account = (account or entering()).log_in()
    wanted = places(regions, account)
    found = [_kept(one) for one in _listed(account)]
    mine = [one for one in found if one and one.region in wanted and cluster in (None, one.cluster)]
    return tuple(sorted(mine, key=lambda one: (one.cluster, one.name)))


def remove(bucket: KeptBucket, account: GcpAccount | None = None) -> None:
    """See ``Cloud``. One that is gone already is no failure. Raises ``BadInput`` for one without our label: it
    is looked at again, since what is deleted here does not come back."""
    account = (account or entering()).log_in()
    path = f"storage/v1/b/{quote(bucket.name, safe='')}"
    try:
        there = _kept(account.ask("storage", path))
    except NotFound:
        return
    if there is None or there.cluster != bucket.cluster:
        raise BadInput(
            f"gs://{bucket.name} is not a bucket that gpuctl made for {bucket.cluster}", "delete it with gcloud storage"
        )
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for _ in pool.map(lambda one: _delete(account, path, one), list(_objects(account, path))):
            pass  # raises what was refused
    account.ask("storage", path, method="DELETE")


def _listed(account: GcpAccount) -> Iterator[Answer]:
    for page in account.pages("storage", "storage/v1/b", project=account.project):
        yield from page.get("items", ())


def _kept(bucket: Answer) -> KeptBucket | None:
    """``None``: it is none of ours."""
    mark = by_labels(bucket.get("labels", {}))
    if mark is None:
        return None
    return KeptBucket(
        cluster=mark.cluster,
        url=f"gs://{bucket['name']}/{mark.cluster}",
        name=bucket["name"],
        region=str(bucket.get("location", "")).lower(),
        cluster_id=mark.id,
        owner=mark.owner,
        created=mark.created,
    )


def _objects(account: GcpAccount, path: str) -> Iterator[tuple[str, str]]:
    """Names and generations, of older versions too: a bucket with any of them is not empty."""
    for page in account.pages("storage", f"{path}/o", versions="true", fields="items(name,generation),nextPageToken"):
        for one in page.get("items", ()):
            yield one["name"], one["generation"]


def _delete(account: GcpAccount, path: str, one: tuple[str, str]) -> None:
    name, generation = one
    try:
        account.ask("storage", f"{path}/o/{quote(name, safe='')}", query={"generation": generation}, method="DELETE")
    except NotFound:
        return
