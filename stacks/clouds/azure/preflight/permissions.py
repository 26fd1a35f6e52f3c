"""The rights of these credentials in a subscription, as Azure itself tells them."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from gpuctl.stacks.clouds.azure.client import Answer, AzureAccount
from gpuctl.stacks.clouds.azure.error_mapping import NotFound

_VERSION = "2022-04-01"


def rights(account: AzureAccount, group: str = "") -> list[Answer]:
    """The permissions of each role that the caller has on all of the subscription, or on a resource group of it, which
    need not be there. Raises ``GpuctlError``; ``Denied`` to those who have none there."""
    where = f"resourcegroups/{group}/" if group else ""
    try:
        return list(account.listed(f"{where}providers/Microsoft.Authorization/permissions", _VERSION))
    except NotFound:
        return []


def may(action: str, rights: Sequence[Answer]) -> bool:
    """One role must allow it: what a role takes out of its own rights another may still give."""
    return any(_has(action, role.get("actions")) and not _has(action, role.get("notActions")) for role in rights)


def _has(action: str, patterns: Sequence[str] | None) -> bool:
    """``*`` stands for anything, slashes among it."""
    return any(fnmatchcase(action.lower(), pattern.lower()) for pattern in patterns or ())
