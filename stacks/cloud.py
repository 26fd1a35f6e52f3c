"""What a cloud must answer. ``aws``, ``gcp`` and ``azure`` each have one, in folders of the same shape:

==================  ==================================================================================================
``__init__.py``     ``CLOUD``: the answers, each from a module below that is imported only when it is asked for
``network.py``      component: where machines live, who may reach them, how they reach the bucket and the Internet
``storage.py``      component: the bucket, private and kept on ``down``
``identity.py``     component: what a node may do, and nothing else
``group.py``        component: the machines, which come back when they are lost
==================  ==================================================================================================
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Literal, Protocol

import msgspec

from gpuctl.cluster.errors import BadInput
from gpuctl.stacks.machines import CLOUDS, MachineType
from gpuctl.stacks.request import StackRequest


@dataclass(frozen=True, slots=True)
class Extra:
    """Something besides the machines that costs money by the hour, such as a NAT gateway."""

    what: str
    usd_per_hour: float


class Cloud(Protocol):
    user_data_bytes: int
    """Most that cloud-init may be given, as it is sent."""

    def program(self, request: StackRequest, machine: MachineType) -> Mapping[str, object]:
        """Runs inside of Pulumi: declares all resources, returns the stack's outputs: ``bucket`` (URL), ``group``,
        ``region``, ``zones``."""
        ...

    def extras(self, request: StackRequest, machine: MachineType) -> Sequence[Extra]: ...


def cloud(name: str) -> Cloud:
    """Raises ``BadInput`` for another name, or if the cloud's packages are not installed."""
    if name not in CLOUDS:
        raise BadInput(f"{name!r} is no cloud", f"use one of: {', '.join(CLOUDS)}")
    found: Cloud = import_module(f"gpuctl.stacks.{name}").CLOUD
    return found


def needs(name: str, error: ModuleNotFoundError) -> BadInput:
    """What to say when an optional package is missing."""
    return BadInput(f"{name} needs {error.name}, which is not installed", f"pip install 'gpuctl[{name}]'")


Severity = Literal["error", "warning", "note"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What a rule has to say of a request (see ``rules``)."""

    rule: str
    severity: Severity
    message: str
    hint: str = ""
