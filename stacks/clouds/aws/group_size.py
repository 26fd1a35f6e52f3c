"""The number of machines that the auto scaling group holds, and why there are not more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gpuctl.stacks.clouds.answers import GroupSize, LaunchProblem, NoGroup
from gpuctl.stacks.clouds.aws.client import Connect, connecting, understood
from gpuctl.stacks.clouds.aws.launch_errors import verdict

_MOST_ACTIVITIES = 20


def size(outputs: Mapping[str, object], connect: Connect | None = None) -> GroupSize:
    """The size of the cluster's group; see ``Cloud``."""
    group = _group(_client(outputs, connect), outputs)
    there = [one for one in group["Instances"] if not one["LifecycleState"].startswith("Terminat")]
    return GroupSize(
        desired=group["DesiredCapacity"],
        running=sum(one["LifecycleState"] == "InService" for one in there),
        names=tuple(sorted(one["InstanceId"] for one in there)),
    )


def resize(outputs: Mapping[str, object], nodes: int, connect: Connect | None = None) -> None:
    """Resize the cluster's group; see ``Cloud``."""
    with understood():
        _client(outputs, connect).set_desired_capacity(
            AutoScalingGroupName=outputs["group"], DesiredCapacity=nodes, HonorCooldown=False
        )


def problems(outputs: Mapping[str, object], connect: Connect | None = None) -> tuple[LaunchProblem, ...]:
    """See ``Cloud``. AWS tells of failures for six weeks: ``readiness`` knows which are of an earlier try."""
    with understood():
        answer = _client(outputs, connect).describe_scaling_activities(
            AutoScalingGroupName=outputs["group"], MaxRecords=_MOST_ACTIVITIES
        )
    newest: dict[str, str] = {}
    for reason, at in _reasons(answer["Activities"]):
        newest.setdefault(reason, at)
    return tuple(LaunchProblem(message=reason, verdict=verdict(reason), at=at) for reason, at in newest.items())


def _reasons(activities: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """The reasons why machines did not start, each with its time, the newest first."""
    for activity in activities:
        # A machine that ends while it starts, as for want of a disk's key, is told as cancelled.
        status = activity.get("StatusCode")
        failed = status == "Failed" or (status == "Cancelled" and "StatusMessage" in activity)
        if failed:
            said = " ".join(activity.get("StatusMessage", "AWS gives no reason").split())
            yield said, str(activity.get("StartTime", ""))


def _client(outputs: Mapping[str, object], connect: Connect | None) -> Any:
    return (connect or connecting())("autoscaling", str(outputs["region"]))


def _group(client: Any, outputs: Mapping[str, object]) -> dict[str, Any]:
    with understood():
        found = client.describe_auto_scaling_groups(AutoScalingGroupNames=[outputs["group"]])["AutoScalingGroups"]
    if not found:
        raise NoGroup(f"the auto scaling group {outputs['group']} is gone", "recreate it with `gpuctl repair`")
    group: dict[str, Any] = found[0]
    return group
