"""The storage accounts that ``down`` leaves, with the checkpoints in them. Each is in a resource group of its own, that
gpuctl made only to hold it (see ``storage``), and goes with that."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from urllib.parse import urlencode

from gpuctl.cluster.errors import BadInput, GpuctlError
from gpuctl.stacks.clouds.answers import KeptBucket
from gpuctl.stacks.clouds.azure.cleanup.deletions import GROUPS, Deletions, DeletionTarget
from gpuctl.stacks.clouds.azure.client import Answer, AzureAccount, connecting, who
from gpuctl.stacks.clouds.azure.error_mapping import NotFound
from gpuctl.stacks.clouds.azure.ids import name_of, type_of
from gpuctl.stacks.clouds.azure.ownership import STORAGE, is_kept, region_of, tagged
from gpuctl.stacks.clouds.azure.regions import places_of
from gpuctl.stacks.clouds.azure.storage_accounts import VERSION
from gpuctl.stacks.request.stack_request import StackRequest


def buckets(
    regions: Sequence[str], cluster: str | None = None, account: AzureAccount | None = None
) -> list[KeptBucket]:
    """See ``Cloud.kept_buckets``. A group whose account never came to be, as ``up`` was interrupted, is listed under
    the name that the account would have had. Raises ``GpuctlError``."""
    account = account or connecting()
    who(account)
    places = places_of(account, regions)
    groups = [
        group
        for group in account.listed("resourcegroups", GROUPS)
        if is_kept(group) and cluster in (None, tagged(group).cluster) and (not places or region_of(group) in places)
    ]
    found = [bucket for group in groups for bucket in _buckets(group, account)]
    return sorted(found, key=lambda one: (one.cluster, one.region, one.name))


def remove(
    bucket: KeptBucket,
    account: AzureAccount | None = None,
    pause: Callable[[float], None] = time.sleep,
    now: Callable[[], float] = time.monotonic,
) -> None:
    """Delete a bucket with its resource group; see ``Cloud.remove_bucket``. What is gone already is no failure.

    Args:
        bucket: names the resource group, the storage account in it and the cluster that they are of.
        account: the subscription to delete in; ``None``: that of the environment.
        pause: see ``Deletions``.
        now: see ``Deletions``.

    Raises ``BadInput``, before anything is deleted, for a group that gpuctl did not make for this cluster, or that
    holds something else besides, and ``GpuctlError`` with Azure's reason.
    """
    account = account or connecting()
    try:
        group = account.got(f"resourcegroups/{bucket.group}", GROUPS)
        things = list(account.listed(f"resourcegroups/{bucket.group}/resources", GROUPS))
    except NotFound:
        return
    if not is_kept(group) or not tagged(group).is_of(bucket.cluster, bucket.cluster_id):
        raise BadInput(
            f"gpuctl did not create the resource group {bucket.group} for {bucket.cluster}", "delete it by hand"
        )
    others = [one for one in things if type_of(one["id"]) != STORAGE or name_of(one["id"]) != bucket.name]
    if others:
        told = ", ".join(sorted(f"{one.get('type', '')} {one['name']}" for one in others))
        raise BadInput(
            f"the resource group {bucket.group} holds more than the bucket: {told}", "move that or delete it first"
        )
    said: list[str] = []
    if Deletions(account, said.append, pause, now).run([DeletionTarget(f"resource group {bucket.group}", group["id"])]):
        raise GpuctlError(said[-1], "see the portal, or az group delete")


def _buckets(group: Answer, account: AzureAccount) -> Iterator[KeptBucket]:
    """The buckets in the storage accounts of a group, from their own provider: the resource manager's list lags."""
    of_group = f"resourcegroups/{group['name']}/providers/Microsoft.Storage/storageAccounts"
    try:
        names = [str(one["name"]) for one in account.listed(of_group, VERSION)]
    except NotFound:
        return
    for name in names:
        inside = account.listed(f"{of_group}/{name}/blobServices/default/containers", VERSION)
        yield _bucket(group, name, account.subscription, missing=next(inside, None) is None)
    if not names:
        name = _request(group, account.subscription).account_name()
        yield _bucket(group, name, account.subscription, missing=True)


def _request(group: Answer, subscription: str) -> StackRequest:
    """The part of a request that gives names."""
    return StackRequest(
        cluster=tagged(group).cluster,
        provider="azure",
        type="",
        nodes_min=0,
        nodes_max=0,
        region=region_of(group),
        account=subscription,
    )


def _bucket(group: Answer, name: str, subscription: str, *, missing: bool = False) -> KeptBucket:
    owner = tagged(group)
    place = _request(group, subscription).place()
    return KeptBucket(
        cluster=owner.cluster,
        url=f"az://{place.name}/{place.prefix}?{urlencode({'account_name': name})}",
        name=name,
        region=region_of(group),
        cluster_id=owner.id,
        owner=owner.owner,
        created=owner.created,
        group=group["name"],
        missing=missing,
    )
