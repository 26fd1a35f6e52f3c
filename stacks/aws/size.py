"""How many machines the auto scaling group holds, and why there are not more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gpuctl.stacks.aws.account import Connect, connecting, understood
from gpuctl.stacks.cloud import GroupSize, NoGroup

_MOST_ACTIVITIES = 20


def size(outputs: Mapping[str, object], connect: Connect | None = None) -> GroupSize:
    """See ``cloud.Cloud``."""
    group = _group(_client(outputs, connect), outputs)
    there = [one for one in group["Instances"] if not one["LifecycleState"].startswith("Terminat")]
    return GroupSize(
        desired=group["DesiredCapacity"],
        running=sum(one["LifecycleState"] == "InService" for one in there),
        names=tuple(sorted(one["InstanceId"] for one in there)),
    )


def resize(outputs: Mapping[str, object], nodes: int, connect: Connect | None = None) -> None:
    """See ``cloud.Cloud``."""
    with understood():
        _client(outputs, connect).set_desired_capacity(
            AutoScalingGroupName=outputs["group"], DesiredCapacity=nodes, HonorCooldown=False
        )


def problems(outputs: Mapping[str, object], connect: Connect | None = None) -> tuple[str, ...]:
    """See ``cloud.Cloud``."""
    with understood():
        answer = _client(outputs, connect).describe_scaling_activities(
            AutoScalingGroupName=outputs["group"], MaxRecords=_MOST_ACTIVITIES
        )
    return tuple(dict.fromkeys(_reasons(answer["Activities"])))


def _reasons(activities: list[dict[str, Any]]) -> Iterator[str]:
    for activity in activities:
        if activity.get("StatusCode") == "Failed":
            yield " ".join(activity.get("StatusMessage", "AWS does not say why").split())


def _client(outputs: Mapping[str, object], connect: Connect | None) -> Any:
    return (connect or connecting())("autoscaling", str(outputs["region"]))


def _group(client: Any, outputs: Mapping[str, object]) -> dict[str, Any]:
    with understood():
        found = client.describe_auto_scaling_groups(AutoScalingGroupNames=[outputs["group"]])["AutoScalingGroups"]
    if not found:
        raise NoGroup(f"the auto scaling group {outputs['group']} is gone", "make it again with `gpuctl repair`")
    group: dict[str, Any] = found[0]
    return group
