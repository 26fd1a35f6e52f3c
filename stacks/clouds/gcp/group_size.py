"""The number of machines that the managed instance group holds, and why there are not more."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any, Literal

import msgspec

from gpuctl.cluster.errors import GpuctlError
from gpuctl.stacks.clouds.answers import GroupSize, LaunchProblem, NoGroup
from gpuctl.stacks.clouds.gcp.client import GcpAccount, entering, last
from gpuctl.stacks.clouds.gcp.error_mapping import NotFound, line

_LEAVING = ("ABANDONING", "DELETING")
_FULL = "RESOURCE_POOL_EXHAUSTED"
"""In the code of an error that says that there is no capacity: of a zone or a region, with details or without."""
_ELSEWHERE = re.compile(
    r"is not available in zone|not supported in (?:the )?zone|"
    r"[Mm]achine type .* (?:does not exist|is not available|not found) in zone|"
    r"/(?:machineTypes|acceleratorTypes|diskTypes)/\S+' was not found"
)
"""In what Google says, whatever the code: the zone does not have the type, or what goes with it."""
_HOPELESS = (
    *("QUOTA", "PERMISSION", "CONDITION_NOT_MET", "RESOURCE_NOT_FOUND"),
    *("INVALID", "REQUIRED", "BAD_REQUEST", "FORBIDDEN"),
)
"""Parts of codes, of errors in every zone: a quota of the region or the project, a right, a rule of the organisation
(``CONDITION_NOT_MET``: "Constraint constraints/… violated"), an image or an account that is not there, a field.
cloud.google.com/compute/docs/troubleshooting/troubleshooting-vm-creation names them."""
_CONSTRAINT = re.compile(r"\bconstraints/[\w.]+")
_RECENT = timedelta(minutes=30)
"""The group tries again and again, and keeps what went wrong for days: older errors say nothing of now."""


def size(outputs: Mapping[str, object], account: GcpAccount | None = None) -> GroupSize:
    """See ``Cloud``. The number and the machines are two requests here."""
    account = account or _entered(str(outputs.get("account") or ""))
    group = _group(outputs, account)
    machines = [one for one in _managed(outputs, account) if one.instance_status]
    return GroupSize(
        desired=group.target_size,
        running=sum(one.instance_status == "RUNNING" and one.current_action not in _LEAVING for one in machines),
        names=tuple(sorted(last(one.instance) for one in machines if one.current_action not in _LEAVING)),
    )


def resize(outputs: Mapping[str, object], nodes: int, account: GcpAccount | None = None) -> None:
    """Resize the cluster's group; see ``Cloud``."""
    account = account or _entered(str(outputs.get("account") or ""))
    try:
        account.compute("InstanceGroupManagers", "resize_unary", **_named(outputs), size=nodes)
    except NotFound as error:
        raise _gone(outputs) from error


def problems(
    outputs: Mapping[str, object], account: GcpAccount | None = None, now: datetime | None = None
) -> tuple[LaunchProblem, ...]:
    """See ``Cloud``: what went wrong in the last half hour, and with the template that machines are made from
    now: what another one was refused for may be put right."""
    account = account or _entered(str(outputs.get("account") or ""))
    since = (now or datetime.now(UTC)) - _RECENT
    group = _group(outputs, account)
    url = _template_url(group)
    kind = _machine_type(url, account)
    errors = [
        (_time(told.timestamp), told.error.code, told.error.message)
        for told in account.listed("InstanceGroupManagers", "list_errors", **_named(outputs))
        if _is_of(told, url)
    ]
    newest: dict[str, LaunchProblem] = {}
    for at, code, said in sorted((one for one in errors if one[0] >= since), reverse=True):
        problem = _problem(code, said, kind, _zone(outputs))
        newest.setdefault(problem.message, msgspec.structs.replace(problem, at=at.isoformat()))
    return tuple(newest.values())


def _is_of(told: Any, template: str) -> bool:
    of = told.instance_action_details.version.instance_template
    return not of or not template or last(of) == last(template)


def _problem(code: str, said: str, kind: str, zone: str) -> LaunchProblem:
    if _FULL in code:
        return LaunchProblem(message=f"no capacity for {kind} in {zone}", verdict="wait")
    return LaunchProblem(message=f"{code}: {line(said)}", verdict=_verdict(code, said))


def _verdict(code: str, said: str) -> Literal["wait", "next zone", "stop"]:
    """Google's name for an error is in capitals where an operation tells it, as in ``RESOURCE_NOT_FOUND``."""
    if _ELSEWHERE.search(said):
        return "next zone"
    if code == "RESOURCE_NOT_FOUND" and "serviceaccount" in said.lower().replace(" ", ""):
        return "wait"  # one that was just made is not known everywhere yet
    if _CONSTRAINT.search(said) or any(part in code for part in _HOPELESS):
        return "stop"
    return "next zone" if code == "UNSUPPORTED_OPERATION" else "wait"


def _template_url(group: Any) -> str:
    """The URL of the template that machines are made from now."""
    return next((one.instance_template for one in group.versions), "") or str(group.instance_template)


def _machine_type(url: str, account: GcpAccount) -> str:
    """The machine type, with its accelerators."""
    try:
        template = account.compute("InstanceTemplates", "get", instance_template=last(url))
    except GpuctlError:
        return "these machines"
    hung_on = [f" + {one.accelerator_count} x {last(one.accelerator_type)}" for one in _accelerators(template)]
    return f"{template.properties.machine_type}{''.join(hung_on)}"


def _accelerators(template: Any) -> Iterator[Any]:
    yield from template.properties.guest_accelerators


def _group(outputs: Mapping[str, object], account: GcpAccount) -> Any:
    try:
        return account.compute("InstanceGroupManagers", "get", **_named(outputs))
    except NotFound as error:
        raise _gone(outputs) from error


def _managed(outputs: Mapping[str, object], account: GcpAccount) -> Iterator[Any]:
    return account.listed("InstanceGroupManagers", "list_managed_instances", **_named(outputs))


def _gone(outputs: Mapping[str, object]) -> NoGroup:
    return NoGroup(
        f"the instance group {outputs['group']} is not in {_zone(outputs)}", "recreate it with `gpuctl repair`"
    )


def _named(outputs: Mapping[str, object]) -> dict[str, str]:
    return {"zone": _zone(outputs), "instance_group_manager": str(outputs["group"])}


def _zone(outputs: Mapping[str, object]) -> str:
    zones = outputs["zones"]
    assert isinstance(zones, list | tuple)
    return str(zones[0])


@cache
def _entered(project: str) -> GcpAccount:
    """The account of a project, logged in once: ``up`` asks again and again, and to find credentials may take gcloud a
    second."""
    return entering(project).log_in()


def _time(told: str) -> datetime:
    """RFC 3339, with whatever offset."""
    return datetime.fromisoformat(told)
