"""Takes a member out of the policy of a project or a bucket, and leaves everything else in it as it is."""

from __future__ import annotations

from typing import Any

from gpuctl.stacks.clouds.answers import Leftover
from gpuctl.stacks.clouds.gcp.client import Answer, GcpAccount
from gpuctl.stacks.clouds.gcp.error_mapping import NotFound

_VERSION = 3
"""The one with conditions: a policy that is read or written as an older one loses them."""


def unbind(account: GcpAccount, binding: Leftover) -> None:
    """``ref`` as ``leaks`` makes it: whose policy, the role, the member. Raises ``NotFound`` if it is not in the
    policy, ``InUse`` if somebody else has changed the policy meanwhile."""
    of, role, member = binding.ref.split(" ", 2)
    policy = _read(account, of)
    bindings = [_without(one, member) if one["role"] == role else one for one in policy.get("bindings", ())]
    if bindings == policy.get("bindings", []):
        raise NotFound(f"{binding.id} is in no policy")
    # With the etag that was read: Google refuses a policy that is made from an older one.
    _write(account, of, {**policy, "version": _VERSION, "bindings": [one for one in bindings if one["members"]]})


def _without(binding: dict[str, Any], member: str) -> dict[str, Any]:
    return {**binding, "members": [one for one in binding.get("members", ()) if one != member]}


def _read(account: GcpAccount, of: str) -> Answer:
    if of.startswith("b/"):
        return account.ask("storage", f"storage/v1/{of}/iam", query={"optionsRequestedPolicyVersion": _VERSION})
    asked = {"options": {"requestedPolicyVersion": _VERSION}}
    return account.ask("cloudresourcemanager", f"v1/{of}:getIamPolicy", asked)


def _write(account: GcpAccount, of: str, policy: Answer) -> None:
    if of.startswith("b/"):
        account.ask("storage", f"storage/v1/{of}/iam", policy, method="PUT")
    else:
        account.ask("cloudresourcemanager", f"v1/{of}:setIamPolicy", {"policy": policy})
