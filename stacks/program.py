"""The program that Pulumi runs: the cloud's, for the request in the stack's configuration; and the stack's outputs."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pulumi

from gpuctl.cluster.errors import BadInput
from gpuctl.stacks.catalog.instance_types import MachineType, catalog
from gpuctl.stacks.clouds.extras import needs
from gpuctl.stacks.clouds.interface import cloud
from gpuctl.stacks.request.stack_request import CONFIG_KEY, StackRequest


def main() -> None:
    """Raises ``pulumi.RunError``, which Pulumi shows as a line and not as a traceback."""
    try:
        declare(configured())
    except BadInput as error:
        raise pulumi.RunError(str(error)) from error


def configured() -> StackRequest:
    """Raises ``BadInput`` if there is no request in the configuration, or none that can be understood."""
    text = pulumi.Config("gpuctl").get(CONFIG_KEY)
    if text is None:
        raise BadInput(f"the stack's configuration has no gpuctl:{CONFIG_KEY}", "examples/stack.yaml shows one")
    try:
        # Not strict: `pulumi config set` knows strings only.
        return msgspec.json.decode(text, type=StackRequest, strict=False)
    except msgspec.MsgspecError as error:
        raise BadInput(
            f"gpuctl:{CONFIG_KEY} is not a valid request: {error}", "examples/stack.yaml shows one"
        ) from error


def declare(request: StackRequest) -> None:
    """All of the cloud's resources, and its outputs as the stack's. Raises ``BadInput``."""
    for name, value in run(request, catalog().type(request.type, request.provider)).items():
        pulumi.export(name, value)


def run(request: StackRequest, machine: MachineType) -> Mapping[str, object]:
    """The cloud's program (see ``Cloud``). Raises ``BadInput`` if no zone was chosen, and if the cloud's packages
    are not installed."""
    there = cloud(request.provider)
    if there.first_zone and not request.zones:
        raise BadInput(f"no zone in {request.region} is set", f"for example {there.first_zone.format(request.region)}")
    try:
        return there.program(request, machine)
    except ModuleNotFoundError as error:
        raise needs(request.provider, error) from error
