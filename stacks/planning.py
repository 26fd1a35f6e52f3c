"""What ``up`` would create and cost, found out offline: no credentials, no Pulumi CLI.

The cloud's program runs against Pulumi's mocks, so it is the same code that creates the machines later. What a cloud
alone can tell (an image's id, quotas, whether there is capacity) is listed as not checked.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import Any

import msgspec
import pulumi
from pulumi.runtime.stack import run_pulumi_func

from gpuctl.stacks.cloud import Finding, cloud
from gpuctl.stacks.machines import MachineType, Price, catalog
from gpuctl.stacks.request import StackRequest
from gpuctl.stacks.rules import Draft, findings

LATER = "known when it is created"
"""Stands for what a cloud answers."""
_UNCHECKED = (
    "credentials and permissions",
    "quotas (gpuctl check)",
    "whether there are such machines to be had now",
)


class Resource(msgspec.Struct, frozen=True, kw_only=True):
    """One resource, as Pulumi's engine would be asked for it."""

    type: str
    """Pulumi token, such as ``aws:ec2/vpc:Vpc``."""
    name: str
    inputs: dict[str, Any]


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """US dollars for an hour of the whole cluster."""

    date: str
    """Of the prices, as YYYY-MM-DD."""
    spot: float | None
    on_demand: float | None
    extras: dict[str, float]

    def per_hour(self, spot: bool) -> float | None:
        """With what is asked for, and everything beside the machines."""
        machines = self.spot if spot else self.on_demand
        return None if machines is None else machines + sum(self.extras.values())


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    request: StackRequest
    machine: MachineType
    resources: tuple[Resource, ...]
    cost: Cost
    findings: tuple[Finding, ...]
    unchecked: tuple[str, ...] = _UNCHECKED

    def counts(self) -> dict[str, int]:
        """Resources by type, without the components that only group them."""
        return dict(Counter(resource.type for resource in self.resources if not resource.type.startswith("gpuctl:")))

    @property
    def errors(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.severity == "error")


def plan(request: StackRequest) -> Plan:
    """Raises ``BadInput`` for an unknown type, and if the cloud's packages are not installed."""
    machine = catalog().type(request.type, request.provider)
    price = price_of(request)
    there = cloud(request.provider)
    return Plan(
        request=request,
        machine=machine,
        resources=tuple(declared(request, machine)),
        cost=Cost(
            date=catalog().date,
            spot=None if price is None or price.spot is None else round(price.spot * request.nodes_max, 4),
            on_demand=None
            if price is None or price.on_demand is None
            else round(price.on_demand * request.nodes_max, 4),
            extras={extra.what: extra.usd_per_hour for extra in there.extras(request, machine)},
        ),
        findings=tuple(findings(Draft(request, machine, price, there))),
    )


def price_of(request: StackRequest) -> Price | None:
    for price in catalog().prices:
        if (price.type, price.region) == (request.type, request.region):
            return price
    return None


def declared(request: StackRequest, machine: MachineType) -> list[Resource]:
    """All resources of the cloud's program, by type and name: the order in which Pulumi hears of them is no order."""
    mocks = _Mocks()
    there = cloud(request.provider)

    def declare() -> None:
        there.program(request, machine)

    async def run() -> None:
        # The stack of an earlier plan belongs to an event loop that is closed.
        pulumi.runtime.settings.set_root_resource(None)  # type: ignore[arg-type]
        pulumi.runtime.set_mocks(mocks, project="gpuctl", stack=request.cluster, preview=True)
        await run_pulumi_func(declare)

    asyncio.run(run())
    return sorted(mocks.resources, key=lambda resource: (resource.type, resource.name))


class _Mocks(pulumi.runtime.Mocks):
    def __init__(self) -> None:
        self.resources: list[Resource] = []

    def new_resource(self, args: pulumi.runtime.MockResourceArgs) -> tuple[str, dict[str, Any]]:
        if args.typ != "pulumi:pulumi:Stack":
            self.resources.append(Resource(type=args.typ, name=args.name, inputs=_plain(args.inputs)))
        return f"{args.name}-id", {**args.inputs, **_answers(args)}

    def call(self, args: pulumi.runtime.MockCallArgs) -> tuple[dict[str, Any], list[tuple[str, str]]]:
        return {**args.args, "value": LATER, "selfLink": LATER, "id": LATER, "name": LATER}, []


def _answers(args: pulumi.runtime.MockResourceArgs) -> dict[str, Any]:
    """What other resources are told of this one."""
    return {
        "arn": f"arn of {args.name}",
        "name": args.inputs.get("name", args.name),
        "latestVersion": 1,
        "selfLink": f"link of {args.name}",
        "email": f"{args.name}@later",
        "principalId": f"principal of {args.name}",
    }


def _plain(value: Any) -> Any:
    """Without Pulumi's own numbers, which are all floats."""
    if isinstance(value, Mapping):
        return {key: _plain(value[key]) for key in sorted(value)}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value
