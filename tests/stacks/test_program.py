"""The program that Pulumi runs in a checkout, as its Python host runs it: the folder of ``main``, as ``__main__``."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import pulumi
import pytest
import yaml
from pulumi.runtime.config import set_all_config

from gpuctl.stacks.catalog.instance_types import CLOUDS, CloudName
from gpuctl.stacks.plan.planner import PlannedResource, recorded
from tests.fakes.requests import asked, planned
from tests.paths import ROOT

MAIN = ROOT / yaml.safe_load((ROOT / "Pulumi.yaml").read_text())["main"]
EXAMPLE = yaml.safe_load((ROOT / "examples" / "stack.yaml").read_text())["config"]["gpuctl:request"]


@pytest.fixture(autouse=True)
def _no_configuration_stays() -> Iterator[None]:
    yield
    set_all_config({})


@pytest.mark.parametrize("provider", CLOUDS)
def test_it_declares_what_was_planned(provider: CloudName) -> None:
    request = asked(provider)
    assert tuple(_run(msgspec.to_builtins(request))) == planned(request).resources


@pytest.mark.slow
def test_the_example_of_a_configuration_is_one() -> None:
    resources = _run(EXAMPLE)
    assert "aws:autoscaling/group:Group" in {resource.type for resource in resources}


def test_no_module_of_the_folder_is_loaded_under_a_second_name() -> None:
    _run(EXAMPLE)
    assert {path.stem for path in MAIN.glob("*.py") if path.stem != "__init__"} & set(sys.modules) <= {"__main__"}


def test_numbers_may_be_text_as_pulumis_own_command_writes_them() -> None:
    told = msgspec.to_builtins(asked("aws")) | {"nodes_max": "4", "nodes_min": "2"}
    assert tuple(_run(told)) == planned(asked("aws")).resources


@pytest.mark.parametrize(
    ("configuration", "message"),
    [
        ({}, "the stack's configuration has no gpuctl:request; examples/stack.yaml shows one"),
        ({"gpuctl:request": "{"}, "gpuctl:request is not a valid request: Input data was truncated"),
        ({"gpuctl:request": json.dumps({**EXAMPLE, "nodes": 4})}, "unknown field `nodes`"),
        ({"gpuctl:request": json.dumps({**EXAMPLE, "type": "p4d.24"})}, "unknown instance type 'p4d.24' on aws"),
        ({"gpuctl:request": json.dumps({**EXAMPLE, "zones": []})}, "no zone in us-east-1 is set"),
    ],
)
def test_a_configuration_that_is_none_is_one_line(configuration: dict[str, str], message: str) -> None:
    set_all_config(configuration)
    with pytest.raises(pulumi.RunError) as refused:
        recorded(_main, "demo")
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def _run(request: Any) -> list[PlannedResource]:
    set_all_config({"gpuctl:request": json.dumps(request)})
    return recorded(_main, "demo")


def _main() -> None:
    runpy.run_path(str(MAIN), run_name="__main__")
