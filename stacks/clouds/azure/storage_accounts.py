"""The storage account of a bucket that is there already, and the right to read it."""

from __future__ import annotations

from gpuctl.cluster.errors import BadInput
from gpuctl.stacks.clouds.answers import KeptBucket
from gpuctl.stacks.clouds.azure.client import AzureAccount, connecting
from gpuctl.stacks.clouds.azure.ids import group_of, name_of
from gpuctl.stacks.request.stack_request import StackRequest

VERSION = "2023-01-01"
BLOB_DATA_CONTRIBUTOR = "ba92f5b4-2d11-453d-a403-e96b0029c9fe"
"""The role that reads and writes, which all of Azure has: learn.microsoft.com, "Azure built-in roles"."""
_ROLES = "2022-04-01"


def bucket_group(request: StackRequest, account: AzureAccount | None = None) -> str:
    """See ``Cloud.bucket_group``. Raises ``BadInput`` if the account is not in the subscription: a role is given
    within one alone."""
    account = account or connecting(request.account)
    name = request.place().options["account_name"]
    for one in account.listed("providers/Microsoft.Storage/storageAccounts", VERSION):
        if name_of(one["id"]) == name:
            return group_of(one["id"])
    raise BadInput(
        f"there is no storage account {name} in subscription {account.subscription}",
        "nodes are given rights in their own subscription only; `az storage account list` shows its accounts",
    )


def may_read(request: StackRequest, bucket: KeptBucket, account: AzureAccount | None = None) -> bool:
    """See ``Cloud.may_read``: a role can be given once only. Raises ``GpuctlError``."""
    account = account or connecting(request.account)
    who = request.reader.rpartition(":")[2]
    scope = f"/resourcegroups/{bucket.group}/providers/microsoft.storage/storageaccounts/{bucket.name}/".lower()
    given = account.listed("providers/Microsoft.Authorization/roleAssignments", _ROLES)
    return any(
        said["principalId"] == who
        and said["roleDefinitionId"].endswith(f"/{BLOB_DATA_CONTRIBUTOR}")
        and scope in f"{said['scope']}/".lower()
        for said in (one["properties"] for one in given)
    )
