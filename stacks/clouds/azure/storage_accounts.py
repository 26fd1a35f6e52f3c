"""The storage account of a bucket that is there already."""

from __future__ import annotations

from gpuctl.cluster.errors import BadInput
from gpuctl.stacks.clouds.azure.client import AzureAccount, connecting
from gpuctl.stacks.clouds.azure.ids import group_of, name_of
from gpuctl.stacks.request.stack_request import StackRequest

VERSION = "2023-01-01"


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
