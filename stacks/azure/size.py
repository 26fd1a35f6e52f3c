"""How many machines the scale set holds, and why there are not more."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any

from gpuctl.stacks.azure.account import Account, Answer, Gone, connecting, understood
from gpuctl.stacks.cloud import Denied, GroupSize, NoGroup

_ACTIVITY = "providers/microsoft.insights/eventtypes/management/values"
_ACTIVITY_VERSION = "2015-04-01"
_LOOK_BACK = timedelta(hours=1)
_ENDING = ("Deleting", "Deallocating")


def size(outputs: Mapping[str, object], account: Account | None = None) -> GroupSize:
    """See ``cloud.Cloud``. It takes a second request for the machines."""
    account, where = _where(outputs, account)
    desired = _scale_set(account, where)["sku"]["capacity"]
    there = [one for one in _machines(account, where) if one["properties"].get("provisioningState") not in _ENDING]
    return GroupSize(
        desired=desired,
        running=sum(_running(one) for one in there),
        names=tuple(sorted(one["name"] for one in there)),
    )


def standing(resource_group: str, group: str, subscription: str, account: Account | None = None) -> int:
    """The number that the scale set works towards; 0: Azure says that there is no such set. Raises ``GpuctlError`` if
    it does not answer, for to send another number is to end machines."""
    try:
        return int(_scale_set(account or _connected(subscription), (resource_group, group))["sku"]["capacity"])
    except NoGroup:
        return 0


def resize(outputs: Mapping[str, object], nodes: int, account: Account | None = None) -> None:
    """See ``cloud.Cloud``."""
    account, where = _where(outputs, account)
    sku = {**_scale_set(account, where)["sku"], "capacity": nodes}
    with understood():
        account.compute.virtual_machine_scale_sets.begin_update(*where, {"sku": sku})  # it goes on by itself


def problems(
    outputs: Mapping[str, object], account: Account | None = None, now: datetime | None = None
) -> tuple[str, ...]:
    """See ``cloud.Cloud``. Of the scale set and its machines as they are, and of what was tried in the last hour: a
    machine that Azure has no room for is no longer there to be asked."""
    account, where = _where(outputs, account)
    told = [*_statuses(account, where), *_tried(account, where, now or datetime.now(UTC))]
    return tuple(dict.fromkeys(line for _, line in sorted(told, key=lambda one: one[0], reverse=True)))


# -- the scale set ----------------------------------------------------------------------------------------------------


def _where(outputs: Mapping[str, object], account: Account | None) -> tuple[Account, tuple[str, str]]:
    """And the names of the resource group and of the set."""
    account = account or _connected(str(outputs.get("account") or ""))
    return account, (str(outputs["resource_group"]), str(outputs["group"]))


@cache
def _connected(subscription: str) -> Account:
    """Once: ``up`` asks every few seconds, and each time anew ``az`` would be asked for a token."""
    return connecting(subscription)


def _scale_set(account: Account, where: tuple[str, str]) -> Answer:
    try:
        with understood():
            answer: Answer = account.compute.virtual_machine_scale_sets.get(*where).as_dict()
    except Gone as error:
        raise NoGroup(f"the scale set {where[1]} is gone", "make it again with `gpuctl repair`") from error
    return answer


def _machines(account: Account, where: tuple[str, str]) -> list[Answer]:
    with understood():
        machines = account.compute.virtual_machine_scale_set_vms.list(*where, expand="instanceView")
        return [machine.as_dict() for machine in machines]


def _running(machine: Answer) -> bool:
    view = machine["properties"].get("instanceView") or {}
    return any(status.get("code") == "PowerState/running" for status in view.get("statuses", ()))


# -- why not more -----------------------------------------------------------------------------------------------------

_Told = tuple[str, str]
"""When, as Azure writes times, and a line."""


def _statuses(account: Account, where: tuple[str, str]) -> Iterator[_Told]:
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


def _tried(account: Account, where: tuple[str, str], now: datetime) -> Iterator[_Told]:
    """The activity log, where the refusals are in full."""
    since, until = ((now - back).strftime("%Y-%m-%dT%H:%M:%SZ") for back in (_LOOK_BACK, timedelta()))
    group, name = where
    of = f"/subscriptions/{account.subscription}/resourceGroups/{group}/providers/Microsoft.Compute"
    wanted = f"eventTimestamp ge '{since}' and eventTimestamp le '{until}'"
    wanted += f" and resourceUri eq '{of}/virtualMachineScaleSets/{name}'"
    try:
        events = list(account.listed(_ACTIVITY, _ACTIVITY_VERSION, **{"$filter": wanted}))
    except Denied:
        return  # what the scale set itself says is told all the same
    for event in events:
        if (event.get("status") or {}).get("value") == "Failed":
            for code, message in _innermost((event.get("properties") or {}).get("statusMessage")):
                yield event.get("eventTimestamp", ""), _line(code, message)


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
