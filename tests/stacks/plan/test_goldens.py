"""Whole plans, compared with those that somebody has read."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from gpuctl.stacks.catalog.instance_types import CLOUDS, CloudName
from tests.fakes.requests import USER_DATA, asked, planned
from tests.stacks.preview import RENEW, compared, golden


@pytest.mark.parametrize("provider", CLOUDS)
def test_a_plan_is_what_it_was_when_it_was_last_looked_at(provider: CloudName) -> None:
    difference = compared(provider, planned(asked(provider)))
    if difference:
        pytest.fail(f"{difference}\n\n{RENEW}", pytrace=False)


def test_a_difference_is_shown_where_it_is() -> None:
    plan = planned(asked("aws"))
    other = msgspec.structs.replace(plan, cost=msgspec.structs.replace(plan.cost, date="2031-01-01"))
    difference = compared("aws", other).splitlines()
    assert f'-  "date": "{plan.cost.date}",' in difference
    assert '+  "date": "2031-01-01",' in difference


@pytest.mark.parametrize(
    ("provider", "kind", "path"),
    [
        ("aws", "LaunchTemplate", ["userData"]),
        ("gcp", "InstanceTemplate", ["metadata", "user-data"]),
        ("azure", "VirtualMachineScaleSet", ["virtualMachineProfile", "osProfile", "customData"]),
    ],
)
def test_what_machines_are_told_at_their_start_can_be_read(provider: CloudName, kind: str, path: list[str]) -> None:
    told = _inputs(provider, kind)
    for key in path:
        told = told[key]
    assert told == USER_DATA


def test_policies_can_be_read() -> None:
    assert [statement["Sid"] for statement in _inputs("aws", "RolePolicy")["policy"]["Statement"]] == [
        "Objects",
        "List",
        "LeaveTheGroup",
    ]


def _inputs(provider: CloudName, kind: str) -> Any:
    resources = json.loads(golden(provider).read_text())["resources"]
    (found,) = [resource["inputs"] for resource in resources if resource["type"].endswith(f":{kind}")]
    return found
