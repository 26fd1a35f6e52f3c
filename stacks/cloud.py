"""What a cloud must answer. ``aws``, ``gcp`` and ``azure`` each have one, in folders of the same shape:

==================  ==================================================================================================
``__init__.py``     ``CLOUD``: the answers, each from a module below that is imported only when it is asked for
``network.py``      component: where machines live, who may reach them, how they reach the bucket and the Internet
``storage.py``      component: the bucket, private and kept on ``down``
``identity.py``     component: what a node may do, and nothing else
``group.py``        component: the machines, which come back when they are lost
``account.py``      how it is asked, with whose credentials, and what its refusals mean
``zones.py``        which zones to try, the best first; Azure gives machines by region
``size.py``         how many machines there are to be and are, and why not more
``leaks.py``        what is there by its tags, whatever Pulumi knows of it
``checks.py``       whether the account would get what is asked for
``offers.py``       what machines cost now
==================  ==================================================================================================
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

import msgspec

from gpuctl.cluster.errors import BadInput, GpuctlError
from gpuctl.stacks.machines import CLOUDS, CloudName, MachineType, Price
from gpuctl.stacks.request import StackRequest


@dataclass(frozen=True, slots=True)
class Extra:
    """Something besides the machines that costs money by the hour, such as a NAT gateway."""

    what: str
    usd_per_hour: float


class Cloud(ABC):
    """One of three. What asks the cloud itself is in its modules, which bring the cloud's packages and so are imported
    when they are needed. All that asks raises ``GpuctlError``: ``BadInput`` where those packages are missing."""

    name: CloudName
    user_data_bytes: int
    """Most that cloud-init may be given, as it is sent."""
    first_zone: str = ""
    """What one is called, with the region for ``{}``; empty: machines are given by region."""

    @abstractmethod
    def program(self, request: StackRequest, machine: MachineType) -> Mapping[str, object]:
        """Runs inside of Pulumi: declares all resources, returns the stack's outputs: ``bucket`` (URL), ``group``,
        ``region``, ``zones``, ``account``; Azure's ``resource_group`` too."""

    @abstractmethod
    def extras(self, request: StackRequest, machine: MachineType) -> Sequence[Extra]: ...

    def account(self, region: str) -> str:
        """Account, project or subscription that the credentials of the environment belong to."""
        return str(self._module("account").own(region))

    def reader(self) -> str:
        """Who is to read the bucket besides the nodes (see ``StackRequest``); empty where that goes without saying."""
        return ""

    def size(self, outputs: Mapping[str, object]) -> GroupSize:
        """Of the group of machines. ``outputs`` are the stack's (see ``program``)."""
        found: GroupSize = self._module("size").size(outputs)
        return found

    def resize(self, outputs: Mapping[str, object], nodes: int) -> None:
        """Returns as soon as the cloud has agreed. A smaller number ends machines of its choice, with the shutdown
        that the agent takes for a notice."""
        self._module("size").resize(outputs, nodes)

    def problems(self, outputs: Mapping[str, object]) -> Sequence[str]:
        """Why machines do not come, the newest first, a line each."""
        found: Sequence[str] = self._module("size").problems(outputs)
        return found

    def leftovers(self, regions: Sequence[str], cluster: str | None) -> Scan:
        """What is there by its tags, without Pulumi's state: of one cluster, or of all. No region: the one of the
        environment; ``all``: each that the account has."""
        found: Scan = self._module("leaks").scan(regions, cluster)
        return found

    def checks(self, request: StackRequest, machine: MachineType) -> Sequence[Check]:
        """Whether it would give what ``request`` wants."""
        found: Sequence[Check] = self._module("checks").checks(request, machine)
        return found

    def spot_prices(self, regions: Sequence[str]) -> Sequence[Price]:
        """Of now, of all types that gpuctl knows, where they are sold."""
        found: Sequence[Price] = self._module("offers").spot_prices(regions)
        return found

    def zones(self, request: StackRequest) -> Sequence[str]:
        """Of the request's region, those that have the type, the best first. Only of clouds with a ``first_zone``."""
        found: Sequence[str] = self._module("zones").zones(request)
        return found

    def price_history(self, kind: str, zone: str, since: float, until: float) -> Sequence[tuple[float, float]]:  # noqa: ARG002
        """Of a type as spot in a zone, between two times in seconds since the epoch: each price with the time it came
        into force, the oldest first; the first of them may be older than ``since``. Empty: the cloud remembers none."""
        return ()

    def _module(self, name: str) -> Any:
        return import_module(f"gpuctl.stacks.{self.name}.{name}")


def cloud(name: str) -> Cloud:
    """Raises ``BadInput`` for another name, or if the cloud's packages are not installed."""
    if name not in CLOUDS:
        raise BadInput(f"{name!r} is no cloud", f"use one of: {', '.join(CLOUDS)}")
    found: Cloud = import_module(f"gpuctl.stacks.{name}").CLOUD
    return found


def needs(name: str, error: ModuleNotFoundError) -> BadInput:
    """What to say when an optional package is missing."""
    return BadInput(f"{name} needs {error.name}, which is not installed", f"pip install 'gpuctl[{name}]'")


class GroupSize(msgspec.Struct, frozen=True, kw_only=True):
    """Of the machines that a cluster's group holds."""

    desired: int
    """The number that the group works towards: what ``up`` set, less the idle nodes that have left."""
    running: int
    names: tuple[str, ...] = ()
    """Of all machines that there are, in the cloud's words, those that only start or end among them."""


class Leftover(msgspec.Struct, frozen=True, kw_only=True):
    """Something with our tags that is there in the cloud."""

    cluster: str
    kind: str
    """In the cloud's words, such as ``NAT gateway``."""
    id: str
    region: str
    """Empty: it is in no region."""
    about: str = ""
    usd_per_hour: float | None = 0.0
    """While it is only there; ``None``: it costs something, and nobody has told us what."""


class Scan(msgspec.Struct, frozen=True, kw_only=True):
    """What was found, by cluster, the dearest first, and what could not be looked at: a scan that was refused something
    proves nothing."""

    regions: tuple[str, ...]
    found: tuple[Leftover, ...]
    unseen: tuple[str, ...] = ()

    @property
    def usd_per_hour(self) -> float:
        """Of all whose price is known."""
        return sum(one.usd_per_hour or 0.0 for one in self.found)


class CredentialsRefused(GpuctlError):
    """There are none, or the cloud does not take them."""


class NoGroup(GpuctlError):
    """The group of a cluster's machines is not there, as the cloud says; one that does not answer is another thing."""


class Denied(GpuctlError):
    """The credentials are good, and may not do this."""


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """What only the cloud could tell of a request before anything is created."""

    name: str
    status: Literal["ok", "fail", "unknown"]
    """``unknown``: it may not be asked."""
    message: str
    page: str = ""
    """Where to mend it."""

    @classmethod
    def ok(cls, name: str, message: str) -> Check:
        return cls(name=name, status="ok", message=message)

    @classmethod
    def fail(cls, name: str, message: str, page: str = "") -> Check:
        return cls(name=name, status="fail", message=message, page=page)

    @classmethod
    def of(cls, name: str, ask: Callable[[], Check]) -> Check:
        """What ``ask`` finds; a cloud that refuses to answer is no failure."""
        try:
            return ask()
        except Denied as error:
            return cls(name=name, status="unknown", message=str(error))
        except GpuctlError as error:
            return cls.fail(name, str(error))


Severity = Literal["error", "warning", "note"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What a rule has to say of a request (see ``rules``)."""

    rule: str
    severity: Severity
    message: str
    hint: str = ""
