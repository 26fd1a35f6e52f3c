"""The content of a stack's state, as ``pulumi stack export`` writes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpuctl.stacks.engine.errors import place

NO_THING = ("pulumi:", "gpuctl:")
"""Types of stacks, providers and components: none of them is anything in a cloud."""
_PROVIDER = "pulumi:providers:"


@dataclass(frozen=True, slots=True)
class StateResource:
    """A resource in the stack's state."""

    type: str
    """Pulumi token, such as ``aws:ec2/vpc:Vpc``."""
    name: str
    id: str = ""
    """The cloud's own."""
    region: str = ""
    """Of its provider; empty if the state does not tell."""

    def __str__(self) -> str:
        return f"{self.type} {self.name}"


@dataclass(frozen=True, slots=True)
class InterruptedCreation:
    """A creation that was interrupted: the resource may exist, and the state has no id of it."""

    type: str
    name: str

    def __str__(self) -> str:
        return f"{self.type} {self.name}"


def resources(deployment: Mapping[str, Any]) -> tuple[StateResource, ...]:
    """The resources in the state that exist in a cloud."""
    everything = deployment.get("resources") or ()
    regions = {one["urn"]: _region(one) for one in everything if one["type"].startswith(_PROVIDER)}
    there = [one for one in everything if not one["type"].startswith(NO_THING)]
    return tuple(
        StateResource(
            *place(one["urn"]),
            id=str(one.get("id") or ""),
            region=regions.get(str(one.get("provider") or "").rpartition("::")[0], ""),
        )
        for one in there
    )


def has_pending(deployment: Mapping[str, Any]) -> bool:
    """Whether the state holds operations that were interrupted."""
    return bool(deployment.get("pending_operations"))


def unknown(deployment: Mapping[str, Any]) -> tuple[InterruptedCreation, ...]:
    """The creations in the state that were interrupted."""
    pending = [one for one in deployment.get("pending_operations") or () if one["type"] == "creating"]
    return tuple(InterruptedCreation(*place(one["resource"]["urn"])) for one in pending)


def _region(provider: Mapping[str, Any]) -> str:
    """Azure calls it a location."""
    inputs = provider.get("inputs") or {}
    return str(inputs.get("region") or inputs.get("location") or "")
