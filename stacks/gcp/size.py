"""How many machines the managed instance group holds, and why there are not more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any

from gpuctl.cluster.errors import GpuctlError
from gpuctl.stacks.cloud import GroupSize, NoGroup
from gpuctl.stacks.gcp.account import Account, NotThere, entering, last

_LEAVING = ("ABANDONING", "DELETING")
_FULL = "RESOURCE_POOL_EXHAUSTED"
"""In the code of an error that says that there is no capacity: of a zone or a region, with details or without."""
_RECENT = timedelta(minutes=30)
"""The group tries again and again, and keeps what went wrong for days: older errors say nothing of now."""


def size(outputs: Mapping[str, object], account: Account | None = None) -> GroupSize:
    """See ``cloud.Cloud``. The number and the machines are two requests here."""
    account = account or _entered(str(outputs.get("account") or ""))
    group = _group(outputs, account)
    machines = [one for one in _managed(outputs, account) if one.instance_status]
    return GroupSize(
        desired=group.target_size,
        running=sum(one.instance_status == "RUNNING" and one.current_action not in _LEAVING for one in machines),
        names=tuple(sorted(last(one.instance) for one in machines if one.current_action not in _LEAVING)),
    )


def resize(outputs: Mapping[str, object], nodes: int, account: Account | None = None) -> None:
    """See ``cloud.Cloud``."""
    account = account or _entered(str(outputs.get("account") or ""))
    try:
        account.compute("InstanceGroupManagers", "resize_unary", **_named(outputs), size=nodes)
    except NotThere as error:
        raise _gone(outputs) from error


def problems(
    outputs: Mapping[str, object], account: Account | None = None, now: datetime | None = None
) -> tuple[str, ...]:
    """See ``cloud.Cloud``: what went wrong in the last half hour."""
    account = account or _entered(str(outputs.get("account") or ""))
    since = (now or datetime.now(UTC)) - _RECENT
    group = _group(outputs, account)
    kind = _machine_type(group, account)
    errors = [
        (_time(told.timestamp), told.error.code, told.error.message)
        for told in account.listed("InstanceGroupManagers", "list_errors", **_named(outputs))
    ]
    recent = sorted((one for one in errors if one[0] >= since), reverse=True)
    return tuple(dict.fromkeys(_reason(code, said, kind, _zone(outputs)) for _, code, said in recent))


def _reason(code: str, said: str, kind: str, zone: str) -> str:
    if _FULL in code:
        return f"no capacity for {kind} in {zone}"
    return f"{code}: {' '.join(said.split())[:200]}"


def _machine_type(group: Any, account: Account) -> str:
    """The one of the template that machines are made from now, with what is hung on it."""
    url = next((one.instance_template for one in group.versions), "") or group.instance_template
    try:
        template = account.compute("InstanceTemplates", "get", instance_template=last(url))
    except GpuctlError:
        return "these machines"
    hung_on = [f" + {one.accelerator_count} x {last(one.accelerator_type)}" for one in _accelerators(template)]
    return f"{template.properties.machine_type}{''.join(hung_on)}"


def _accelerators(template: Any) -> Iterator[Any]:
    yield from template.properties.guest_accelerators


def _group(outputs: Mapping[str, object], account: Account) -> Any:
    try:
        return account.compute("InstanceGroupManagers", "get", **_named(outputs))
    except NotThere as error:
        raise _gone(outputs) from error


def _managed(outputs: Mapping[str, object], account: Account) -> Iterator[Any]:
    return account.listed("InstanceGroupManagers", "list_managed_instances", **_named(outputs))


def _gone(outputs: Mapping[str, object]) -> NoGroup:
    return NoGroup(
        f"the instance group {outputs['group']} is not in {_zone(outputs)}", "make it again with `gpuctl repair`"
    )


def _named(outputs: Mapping[str, object]) -> dict[str, str]:
    return {"zone": _zone(outputs), "instance_group_manager": str(outputs["group"])}


def _zone(outputs: Mapping[str, object]) -> str:
    zones = outputs["zones"]
    assert isinstance(zones, list | tuple)
    return str(zones[0])


@cache
def _entered(project: str) -> Account:
    """Once: ``up`` asks again and again, and to find credentials may take gcloud a second."""
    return entering(project).log_in()


def _time(told: str) -> datetime:
    """RFC 3339, with whatever offset."""
    return datetime.fromisoformat(told)
