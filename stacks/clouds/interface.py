"""The interface of a cloud. ``aws``, ``gcp`` and ``azure`` each implement it, in folders of the same shape:

====================  ================================================================================================
``__init__``          ``CLOUD``: the answers, each from a module below that is imported only when it is asked for
``client``            how it is asked, with whose credentials
``usual_region``      the region that its own tools would use
``zones``             which zones to try, the best first; Azure gives machines by region
``spot_prices``       what machines cost now
``group_size``        how many machines there are to be and are, and why not more
``resources/``        what Pulumi makes, a component each
``  network``         where machines live, who may reach them, how they reach the bucket and the Internet
``  storage``         the bucket, private and kept on ``down``
``  identity``        what a node may do, and nothing else
``  group``           the machines, which come back when they are lost
``preflight/``
``  checks``          whether the account would get what is asked for
``cleanup/``
``  leaks``           what is there by its tags, whatever Pulumi knows of it
``  removal``         deletes what ``leaks`` found, in the order that the cloud asks for, without Pulumi
``  kept_buckets``    the buckets that ``down`` has left: lists them, deletes them with all that is in them
====================  ================================================================================================
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from gpuctl.cluster.errors import BadInput
from gpuctl.stacks.catalog.instance_types import CLOUDS, CloudName, MachineType, Price
from gpuctl.stacks.catalog.provider_names import unknown_provider
from gpuctl.stacks.clouds.answers import GroupSize, KeptBucket, LaunchProblem, Leftover, PreflightCheck, Scan
from gpuctl.stacks.clouds.extras import SDKS, require
from gpuctl.stacks.request.stack_request import StackRequest

LATER = "known when it is created"
"""Stands in a plan for what a cloud will only answer once it is made."""
HOURS_A_MONTH = 730
"""As the clouds' own price lists reckon."""


@dataclass(frozen=True, slots=True)
class Extra:
    """A resource besides the machines that costs money by the hour, such as a NAT gateway."""

    what: str
    usd_per_hour: float


class Cloud(ABC):
    """A cloud provider. What asks the cloud itself is in its modules, which bring the cloud's packages and so are
    imported when they are needed. All that asks raises ``GpuctlError``: ``BadInput`` where those packages are missing.
    """

    name: CloudName
    user_data_bytes: int
    """Most that cloud-init may be given, as it is sent."""
    notice_s: float = 30.0
    """Seconds between a notice and the end, where a notice does not say so itself."""
    first_zone: str = ""
    """What one is called, with the region for ``{}``; empty: machines are given by region."""

    @abstractmethod
    def program(self, request: StackRequest, machine: MachineType) -> Mapping[str, object]:
        """Runs inside of Pulumi: declares all resources, returns the stack's outputs: ``bucket`` (URL), ``group``,
        ``region``, ``zones``, ``account``; Azure's ``resource_group`` too."""

    @abstractmethod
    def extras(self, request: StackRequest, machine: MachineType) -> Sequence[Extra]: ...

    def node_env(self, request: StackRequest) -> Mapping[str, str]:  # noqa: ARG002
        """Variables of every node's agent. No secret."""
        return {}

    def shutdown_s(self, request: StackRequest) -> float:  # noqa: ARG002
        """Seconds that a machine has from the beginning of a shutdown, whoever asked for it, until the cloud takes it
        away: the lead of the notice that the agent takes a shutdown for. ``AGENT_STOP_S`` at most."""
        return 30.0

    def account(self, region: str) -> str:
        """Account, project or subscription that the credentials of the environment belong to."""
        return str(self._module("client").own(region))

    def reader(self) -> str:
        """The reader of the bucket besides the nodes (see ``StackRequest``); empty where that goes without saying."""
        return ""

    def bucket_group(self, request: StackRequest) -> str:  # noqa: ARG002
        """The resource group of the bucket in the request; empty: a bucket is known by its URL."""
        return ""

    def size(self, outputs: Mapping[str, object]) -> GroupSize:
        """The size of the group of machines. ``outputs`` are the stack's (see ``program``)."""
        found: GroupSize = self._module("group_size").size(outputs)
        return found

    def resize(self, outputs: Mapping[str, object], nodes: int) -> None:
        """Returns as soon as the cloud has agreed. A smaller number ends machines of its choice, with the shutdown
        that the agent takes for a notice."""
        self._module("group_size").resize(outputs, nodes)

    def problems(self, outputs: Mapping[str, object]) -> Sequence[LaunchProblem]:
        """The reasons why machines do not come, the newest first."""
        found: Sequence[LaunchProblem | str] = self._module("group_size").problems(outputs)
        return [LaunchProblem(message=one) if isinstance(one, str) else one for one in found]

    def leftovers(self, regions: Sequence[str], cluster: str | None) -> Scan:
        """The resources that are there by their tags, without Pulumi's state: of one cluster, or of all. ``regions``:
        names, or ``all`` for each that the account has; which ones to look into is decided by ``regions`` (see there).
        """
        found: Scan = self._module("cleanup.leaks").scan(regions, cluster)
        return found

    def parts(self, leftovers: Sequence[Leftover]) -> Sequence[Leftover]:  # noqa: ARG002
        """What stands in ``leftovers``, is in no scan, and cannot be made a second time. ``remove`` deletes it too."""
        return ()

    def remove(self, leftovers: Sequence[Leftover], say: Callable[[str], None]) -> None:
        """Delete what ``leftovers`` found, each before what it stands in (machines before networks), and wait until
        each is gone. What is gone already is no failure. What cannot be deleted is told by ``say`` with the cloud's
        reason and is in the next scan: that, and not this call, is the proof."""
        self._module("cleanup.removal").remove(leftovers, say)

    def kept_buckets(self, regions: Sequence[str], cluster: str | None) -> Sequence[KeptBucket]:
        """Buckets that gpuctl made: of clusters that are gone, and of those that are up. ``regions`` as for
        ``leftovers``."""
        found: Sequence[KeptBucket] = self._module("cleanup.kept_buckets").buckets(regions, cluster)
        return found

    def unread_buckets(self, request: StackRequest) -> Sequence[KeptBucket]:  # noqa: ARG002
        """What an earlier ``up`` has left of the bucket that this request would make, whole or not, where whoever
        makes a bucket may read it only once a role says so. Empty where that goes without saying."""
        return ()

    def may_read(self, request: StackRequest, bucket: KeptBucket) -> bool:  # noqa: ARG002
        """Whether the request's reader has a role to read ``bucket``, though the storage may not know of it yet."""
        return True

    def remove_bucket(self, bucket: KeptBucket) -> None:
        """Remove a bucket with everything in it, and with what was made only to hold it, such as Azure's storage
        account and group."""
        self._module("cleanup.kept_buckets").remove(bucket)

    def usual_region(self) -> tuple[str, str]:
        """The region that the cloud's own tools would use, and where that is said, such as ``AWS_REGION`` or ``profile
        research``; two empty strings if nothing says so. Reads variables and files only: no request, no SDK."""
        found: tuple[str, str] = self._module("usual_region").usual_region()
        return found

    def checks(self, request: StackRequest, machine: MachineType) -> Sequence[PreflightCheck]:
        """Check whether the cloud would give what is asked for. Raises ``NotInstalled``: no answer of the cloud's."""
        require(self.name, SDKS[self.name])
        found: Sequence[PreflightCheck] = self._module("preflight.checks").checks(request, machine)
        return found

    def spot_prices(self, regions: Sequence[str]) -> Sequence[Price]:
        """Current spot prices of all types that gpuctl knows, in all regions that sell them."""
        found: Sequence[Price] = self._module("spot_prices").spot_prices(regions)
        return found

    def zones(self, request: StackRequest) -> Sequence[str]:
        """The zones of the request's region that have the type, the best first. Only for clouds with ``first_zone``."""
        found: Sequence[str] = self._module("zones").zones(request)
        return found

    def price_history(self, kind: str, zone: str, since: float, until: float) -> Sequence[tuple[float, float]]:  # noqa: ARG002
        """The spot prices of a type over time, in US dollars per hour: each after the time it came into force, in
        seconds since the epoch, the oldest first; the first of them may be older than ``since``. Empty: the cloud
        remembers none.

        Args:
            kind: instance type.
            zone: the cloud's own name, such as ``us-east-1a``.
            since: beginning of the time asked about, in seconds since the epoch.
            until: its end, in seconds since the epoch.
        """
        return ()

    def _module(self, name: str) -> Any:
        return import_module(f"gpuctl.stacks.clouds.{self.name}.{name}")


def cloud(name: str) -> Cloud:
    """Raises ``BadInput`` for another name."""
    if name in ("local", "ssh"):
        raise BadInput(f"provider {name} is not a cloud", f"use one of: {', '.join(CLOUDS)}")
    if name not in CLOUDS:
        raise unknown_provider(name)
    found: Cloud = import_module(f"gpuctl.stacks.clouds.{name}").CLOUD
    return found
