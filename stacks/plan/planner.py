"""The plan of what ``up`` would create and cost, found out offline: no credentials, no Pulumi CLI.

The cloud's program runs against Pulumi's mocks, so it is the same code that creates the machines later. What a cloud
alone can tell (an image's id, quotas, whether there is capacity) is listed as not checked.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pulumi
from pulumi.output import Unknown
from pulumi.runtime.mocks import MockMonitor
from pulumi.runtime.stack import run_pulumi_func

from gpuctl.stacks import program
from gpuctl.stacks.catalog.instance_types import MachineType, Price, catalog
from gpuctl.stacks.clouds.answers import PlanFinding
from gpuctl.stacks.clouds.interface import LATER, cloud
from gpuctl.stacks.plan.validators import Draft, findings
from gpuctl.stacks.request.stack_request import StackRequest

_ASKED = ("id", "name", "objectId", "project", "selfLink", "subscriptionId", "value")
"""What programs want to know of a cloud."""
_NAMED_BY = ("name", "vmScaleSetName", "virtualNetworkName", "accountName", "resourceGroupName")
_UNCHECKED = (
    "credentials and permissions",
    "quotas",
    "whether such machines are available now",
)


class PlannedResource(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One resource, as Pulumi's engine would be asked for it."""

    type: str
    """Pulumi token, such as ``aws:ec2/vpc:Vpc``."""
    name: str
    inputs: dict[str, Any]
    kept: bool = False
    """``down`` leaves it."""
    pinned: tuple[str, ...] = ()
    """Inputs that count when it is created, and never again."""
    after: tuple[str, ...] = ()
    """What is there before it is created and after it is deleted, as ``Vpc/demo``."""


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """US dollars for an hour of the whole cluster."""

    date: str
    """Of the prices, as YYYY-MM-DD."""
    spot: float | None
    on_demand: float | None
    extras: dict[str, float]

    def per_hour(self, spot: bool) -> float | None:
        """The cost per hour of what is asked for, and of everything beside the machines."""
        machines = self.spot if spot else self.on_demand
        return None if machines is None else machines + sum(self.extras.values())


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    request: StackRequest
    machine: MachineType
    resources: tuple[PlannedResource, ...]
    cost: Cost
    findings: tuple[PlanFinding, ...]
    unchecked: tuple[str, ...]

    def counts(self) -> dict[str, int]:
        """Resources by type, without the components that only group them, and without providers."""
        no_thing = ("gpuctl:", "pulumi:")
        return dict(Counter(resource.type for resource in self.resources if not resource.type.startswith(no_thing)))

    @property
    def errors(self) -> tuple[PlanFinding, ...]:
        return tuple(finding for finding in self.findings if finding.severity == "error")


def plan(request: StackRequest) -> Plan:
    """Raises ``BadInput`` for an unknown type, and if the cloud's packages are not installed."""
    machine = catalog().type(request.type, request.provider)
    price = price_of(request)
    there = cloud(request.provider)
    somewhere, unchecked = request, list(_UNCHECKED)
    if there.first_zone and not request.zones:
        zone = there.first_zone.format(request.region)
        somewhere = msgspec.structs.replace(request, zones=(zone,))
        unchecked.append(f"which zone has capacity ({zone} stands for it)")
    return Plan(
        request=request,
        machine=machine,
        resources=tuple(declared(somewhere, machine)),
        cost=Cost(
            date=(price and ((request.spot and price.spot_date) or price.date)) or catalog().date,
            spot=None if price is None or price.spot is None else round(price.spot * request.nodes_max, 4),
            on_demand=None
            if price is None or price.on_demand is None
            else round(price.on_demand * request.nodes_max, 4),
            extras={extra.what: extra.usd_per_hour for extra in there.extras(request, machine)},
        ),
        findings=tuple(findings(Draft(request, machine, price, there))),
        unchecked=tuple(unchecked),
    )


def price_of(request: StackRequest) -> Price | None:
    for price in catalog().prices:
        if (price.type, price.region) == (request.type, request.region):
            return price
    return None


def declared(request: StackRequest, machine: MachineType) -> list[PlannedResource]:
    """All resources of the cloud's program. Raises ``BadInput`` if the cloud's packages are not installed."""

    def declare() -> None:
        program.run(request, machine)

    return recorded(declare, request.cluster)


def recorded(declare: Callable[[], None], stack: str) -> list[PlannedResource]:
    """The resources that ``declare`` declares, by type and name, as the order in which Pulumi hears of them varies."""
    mocks = _Mocks()
    monitor = _Monitor(mocks)
    loops: list[asyncio.AbstractEventLoop] = []

    def with_loop() -> None:
        # Pulumi's mocks make one in every thread and never close it, which Python may complain of at exit.
        loops.append(asyncio.new_event_loop())
        asyncio.set_event_loop(loops[-1])

    async def run() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(initializer=with_loop))
        # The stack of an earlier plan belongs to an event loop that is closed.
        pulumi.runtime.settings.set_root_resource(None)  # type: ignore[arg-type]
        pulumi.runtime.set_mocks(mocks, project="gpuctl", stack=stack, preview=True, monitor=monitor)
        pulumi.runtime.register_stack_transformation(_without_aliases)
        await run_pulumi_func(declare)

    asyncio.run(run())
    for loop in loops:
        loop.close()
    return [
        PlannedResource(
            type=kind,
            name=name,
            inputs=mocks.inputs[kind, name],
            kept=asked.retainOnDelete,
            pinned=tuple(asked.ignoreChanges),
            after=tuple(sorted(_place(urn) for urn in asked.dependencies if "gpuctl:" not in _kind(urn))),
        )
        for (kind, name), asked in sorted(monitor.asked.items(), key=lambda item: item[0])
    ]


class _Monitor(MockMonitor):
    """Records what ``Mocks`` are not told."""

    def __init__(self, mocks: pulumi.runtime.Mocks) -> None:
        super().__init__(mocks)
        self.asked: dict[tuple[str, str], Any] = {}

    def RegisterResource(self, request: Any) -> Any:  # noqa: N802 (Pulumi's name)
        if request.type != "pulumi:pulumi:Stack":
            self.asked[request.type, request.name] = request
        return super().RegisterResource(request)  # type: ignore[no-untyped-call]


class _Mocks(pulumi.runtime.Mocks):
    def __init__(self) -> None:
        self.inputs: dict[tuple[str, str], dict[str, Any]] = {}

    def new_resource(self, args: pulumi.runtime.MockResourceArgs) -> tuple[str, dict[str, Any]]:
        self.inputs[args.typ, args.name] = _plain(args.inputs)
        # Lists and mappings stay out: what a cloud answers need not have the shape of what it was asked.
        said = {key: value for key, value in args.inputs.items() if isinstance(value, str | bool | float)}
        return _id(args), {**said, **_answers(args)}

    def call(self, args: pulumi.runtime.MockCallArgs) -> tuple[dict[str, Any], list[tuple[str, str]]]:
        return {**args.args, **dict.fromkeys(_ASKED, LATER)}, []


def _without_aliases(args: pulumi.ResourceTransformationArgs) -> pulumi.ResourceTransformationResult:
    """Drop the names that a type had in older versions, which matter where there is a state. Azure's have dozens of
    such names, and most of a plan's time would go to them."""
    args.opts.aliases = None
    return pulumi.ResourceTransformationResult(args.props, args.opts)


def _answers(args: pulumi.runtime.MockResourceArgs) -> dict[str, Any]:
    """The outputs that other resources are told of this one."""
    return {
        "arn": f"arn of {_id(args)}",
        "name": next((args.inputs[key] for key in _NAMED_BY if key in args.inputs), args.name),
        "latestVersion": 1,
        "selfLink": f"link of {_id(args)}",
        "email": f"email of {_id(args)}",
        "principalId": f"principal of {_id(args)}",
    }


def _id(args: pulumi.runtime.MockResourceArgs) -> str:
    """A resource's id in the plan, such as ``Vpc/demo``."""
    return f"{args.typ.rpartition(':')[2]}/{args.name}"


def _kind(urn: str) -> str:
    """The type in ``urn:pulumi:<stack>::<project>::<types, the parent's first>::<name>``."""
    return urn.split("::")[2].rpartition("$")[2]


def _place(urn: str) -> str:
    return f"{_kind(urn).rpartition(':')[2]}/{urn.split('::', 3)[3]}"


def _plain(value: Any) -> Any:
    """A value without Pulumi's own numbers, which are all floats, and its word for what nobody knows yet."""
    if isinstance(value, Unknown):
        return LATER
    if isinstance(value, Mapping):
        return {key: _plain(value[key]) for key in sorted(value)}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value
