"""The number of machines that the scale set holds, and why there are not more."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any, Literal

from gpuctl.stacks.clouds.answers import Denied, GroupSize, LaunchProblem, NoGroup
from gpuctl.stacks.clouds.azure.client import Answer, AzureAccount, connecting
from gpuctl.stacks.clouds.azure.error_mapping import NotFound, understood

_ACTIVITY = "providers/microsoft.insights/eventtypes/management/values"
_ACTIVITY_VERSION = "2015-04-01"
_LOOK_BACK = timedelta(hours=1)
_ENDING = ("Deleting", "Deallocating")
_LASTS = (
    *("QuotaExceeded", "RequestDisallowedByPolicy", "AuthorizationFailed", "LinkedAuthorizationFailed"),
    *("InvalidParameter", "InvalidTemplateDeployment", "ImageNotFound", "PlatformImageNotFound"),
    *("GalleryImageNotFound", "MarketplacePurchaseEligibilityFailed", "VMMarketplaceInvalidInput"),
    *("PublicIPCountLimitReached", "ReadOnlyDisabledSubscription", "NotAvailableForSubscription"),
)
"""Codes of what waiting does not change. Not among them: AllocationFailed, ZonalAllocationFailed,
OverconstrainedAllocationRequest and SkuNotAvailable, which are of this hour's capacity (learn.microsoft.com,
"Troubleshoot allocation failures", and "Resolve errors for SKU not available"; ``check`` asks whether a size is closed
to a subscription)."""
_LASTS_IF_QUOTA = ("OperationNotAllowed",)
"""Azure's code for most that a quota does not allow, and for other things."""


def size(outputs: Mapping[str, object], account: AzureAccount | None = None) -> GroupSize:
    """See ``Cloud``. It takes a second request for the machines."""
    account, where = _where(outputs, account)
    desired = _scale_set(account, where)["sku"]["capacity"]
    there = [one for one in _machines(account, where) if one["properties"].get("provisioningState") not in _ENDING]
    return GroupSize(
        desired=desired,
        running=sum(_running(one) for one in there),
        names=tuple(sorted(one["name"] for one in there)),
    )


def standing(resource_group: str, group: str, subscription: str, account: AzureAccount | None = None) -> int:
    """The number of machines that the scale set works towards; 0: Azure says that there is no such set.

    Args:
        resource_group: name of the group that the set is in.
        group: name of the scale set.
        subscription: id of the one to ask; not read if there is an ``account``.
        account: the subscription to ask; ``None``: ``subscription``, with the credentials of the environment.

    Raises ``GpuctlError`` if it does not answer, for to send another number is to end machines.
    """
    try:
        return int(_scale_set(account or _connected(subscription), (resource_group, group))["sku"]["capacity"])
    except NoGroup:
        return 0


def resize(outputs: Mapping[str, object], nodes: int, account: AzureAccount | None = None) -> None:
    """Resize the cluster's group; see ``Cloud``."""
    account, where = _where(outputs, account)
    sku = {**_scale_set(account, where)["sku"], "capacity": nodes}
    with understood():
        account.compute.virtual_machine_scale_sets.begin_update(*where, {"sku": sku})  # it goes on by itself


def problems(
    outputs: Mapping[str, object], account: AzureAccount | None = None, now: datetime | None = None
) -> tuple[LaunchProblem, ...]:
    """See ``Cloud``. Of the scale set and its machines as they are, and of what was tried in the last hour: a
    machine that Azure has no room for is no longer there to be asked. What was tried before something of the set last
    succeeded is over, and may have been of an earlier set of this name. ``next zone`` is never among it: a region is
    one place here."""
    account, where = _where(outputs, account)
    told = [*_statuses(account, where), *_tried(account, where, now or datetime.now(UTC))]
    newest: dict[str, str] = {}
    for at, line in sorted(told, key=lambda one: _time(one[0]), reverse=True):
        newest.setdefault(line, at)
    return tuple(LaunchProblem(message=line, verdict=verdict(line), at=at) for line, at in newest.items())


def verdict(line: str) -> Literal["wait", "stop"]:
    """The meaning of an error code for those who wait. Unknown codes count as temporary."""
    code, _, said = line.partition(":")
    if code in _LASTS or (code in _LASTS_IF_QUOTA and "quota" in said.lower()):
        return "stop"
    return "wait"


# -- the scale set ----------------------------------------------------------------------------------------------------


def _where(outputs: Mapping[str, object], account: AzureAccount | None) -> tuple[AzureAccount, tuple[str, str]]:
    """The account to ask, and the names of the resource group and of the set."""
    account = account or _connected(str(outputs.get("account") or ""))
    return account, (str(outputs["resource_group"]), str(outputs["group"]))


@cache
def _connected(subscription: str) -> AzureAccount:
    """The account of a subscription, connected once: ``up`` asks every few seconds, and each time anew ``az`` would be
    asked for a token."""
    return connecting(subscription)


def _scale_set(account: AzureAccount, where: tuple[str, str]) -> Answer:
    try:
        with understood():
            answer: Answer = account.compute.virtual_machine_scale_sets.get(*where).as_dict()
    except NotFound as error:
        raise NoGroup(f"the scale set {where[1]} is gone", "recreate it with `gpuctl repair`") from error
    return answer


def _machines(account: AzureAccount, where: tuple[str, str]) -> list[Answer]:
    with understood():
        machines = account.compute.virtual_machine_scale_set_vms.list(*where, expand="instanceView")
        return [machine.as_dict() for machine in machines]


def _running(machine: Answer) -> bool:
    view = machine["properties"].get("instanceView") or {}
    return any(status.get("code") == "PowerState/running" for status in view.get("statuses", ()))


# -- why not more -----------------------------------------------------------------------------------------------------

_Told = tuple[str, str]
"""When, as Azure writes times, and a line."""


def _statuses(account: AzureAccount, where: tuple[str, str]) -> Iterator[_Told]:
    with understood():
        view = account.compute.virtual_machine_scale_sets.get_instance_view(*where).as_dict()
    yield from _errors(view)
    for machine in _machines(account, where):
        yield from _errors(machine["properties"].get("instanceView") or {})


def _errors(view: Answer) -> Iterator[_Told]:
    for status in view.get("statuses") or ():
        if status.get("level") == "Error":
            code = status.get("code", "").rpartition("/")[2]  # of ProvisioningState/failed/AllocationFailed
            yield status.get("time", ""), _line(code, status.get("message") or status.get("displayStatus", ""))


def _tried(account: AzureAccount, where: tuple[str, str], now: datetime) -> list[_Told]:
    """Attempts in the activity log, which has the refusals in full."""
    since, until = ((now - back).strftime("%Y-%m-%dT%H:%M:%SZ") for back in (_LOOK_BACK, timedelta()))
    group, name = where
    of = f"/subscriptions/{account.subscription}/resourceGroups/{group}/providers/Microsoft.Compute"
    wanted = f"eventTimestamp ge '{since}' and eventTimestamp le '{until}'"
    wanted += f" and resourceUri eq '{of}/virtualMachineScaleSets/{name}'"
    try:
        events = list(account.listed(_ACTIVITY, _ACTIVITY_VERSION, **{"$filter": wanted}))
    except Denied:
        return []  # what the scale set itself says is told all the same
    over = max((_time(one.get("eventTimestamp", "")) for one in events if _status(one) == "Succeeded"), default=None)
    return [
        (event.get("eventTimestamp", ""), _line(code, message))
        for event in events
        if _status(event) == "Failed" and (over is None or _time(event.get("eventTimestamp", "")) > over)
        for code, message in _innermost((event.get("properties") or {}).get("statusMessage"))
    ]


def _status(event: Answer) -> str:
    return str((event.get("status") or {}).get("value", ""))


def _time(text: str) -> datetime:
    """Azure writes ``Z`` or ``+00:00``, and up to seven digits of a second. What has no time is of now."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return datetime.max.replace(tzinfo=UTC)
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _innermost(text: Any) -> Iterator[tuple[str, str]]:
    """Codes and messages of an error within errors; those outside say no more than that something failed."""
    try:
        error = json.loads(text)["error"]
    except (KeyError, TypeError, ValueError):
        return
    layer = [error]
    while deeper := [inner for one in layer for inner in one.get("details") or () if inner.get("code")]:
        layer = deeper
    for one in layer:
        yield str(one.get("code", "")), str(one.get("message", ""))


def _line(code: str, message: str) -> str:
    said = " ".join(message.split())
    return f"{code}: {said}"[:300] if said else code
