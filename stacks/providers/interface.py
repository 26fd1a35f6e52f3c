"""The interface of a provider of machines, and the table of those there are.

A provider makes machines that run the agent and takes them away; everything else (jobs, logs, checkpoints, status)
goes through the bucket and is the same for all. What only some can do is a class of its own, which a verb asks for:
``UsesMachines`` or ``RentsMachines``, and ``CanPreempt``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from gpuctl.cluster.records.clusters import ClusterSpec, PastCluster
from gpuctl.stacks.catalog.provider_names import unknown_provider
from gpuctl.stacks.state.clusters import KnownCluster, command

if TYPE_CHECKING:
    from gpuctl.stacks.clouds.answers import KeptBucket, Scan
    from gpuctl.stacks.engine.events import OnProgress
    from gpuctl.stacks.request.last_request import NodeOptions
    from gpuctl.stacks.request.stack_request import StackRequest

Say = Callable[[str], None]
"""Takes one line of progress, for a person."""


class Dialog:
    """The side of whoever asked for something: hears how it goes, and is asked before money is spent or something is
    deleted. This one agrees to all of it, for a program that has decided already."""

    def __init__(self, say: Say = lambda _: None) -> None:
        self.say = say
        """Takes one line of progress."""

    def confirm(self, question: str) -> None:
        """Agree to what costs money, or raise ``GpuctlError``."""

    def confirm_removal(self, found: Scan) -> None:
        """Agree to the deletion of resources that were found by their tags, or raise ``GpuctlError``."""

    @contextmanager
    def progress(self) -> Iterator[OnProgress]:
        """Yield a callback that hears of each resource while it is changed."""
        yield lambda _: None


@dataclass(frozen=True, slots=True)
class UpRequest:
    """The arguments of ``gpuctl up``. ``None`` keeps what the cluster has."""

    name: str
    nodes_min: int | None = None
    nodes_max: int | None = None
    """Both at first: 1, or as many as there are ``hosts``."""
    slots: int | None = None
    """Worker processes per node; at first: the GPUs found, else 1."""
    bucket: str | None = None
    """URL of the bucket and prefix for the cluster; at first the provider makes or chooses one."""
    hosts: tuple[str, ...] = ()
    """Only of provider ssh: the machines, as ``[USER@]HOST[:PORT]``; empty: nothing was said."""
    stall_minutes: float | None = None
    """See ``ClusterSpec``."""


@dataclass(frozen=True, slots=True)
class RentRequest:
    """The arguments of ``gpuctl up`` on a cloud."""

    request: StackRequest
    terms: NodeOptions
    backend: str
    """Where Pulumi's state is: see ``Engine``."""
    wait_s: float
    """How long to wait for machines in each zone."""
    force: bool = False
    """Clear a lock that another machine has left."""


class Provider(ABC):
    """A provider of machines. All operations are idempotent and raise ``GpuctlError``."""

    def __init__(self, name: str, dialog: Dialog) -> None:
        self.name = name
        self._dialog = dialog

    @abstractmethod
    def down(self, cluster: KnownCluster, *, force: bool = False) -> list[str]:
        """Take everything away but the bucket, then look without relying on what was noted: names what is left.
        ``force``: what cannot be reached is forgotten, and another machine's lock is cleared."""

    def check_down(self, cluster: KnownCluster) -> None:  # noqa: B027 - most can from anywhere
        """Look, before anything of it ends, whether ``down`` can be done from here. Raises ``BadInput``."""

    def retry_hint(self, cluster: KnownCluster) -> str:
        """The hint for a person where ``down`` has left something."""
        return f"run `{command('down', cluster.name)}` again"

    def has_own_bucket(self, cluster: KnownCluster) -> bool:  # noqa: ARG002
        """Whether ``up`` made the cluster's bucket, or would have, had it come so far."""
        return False

    def attach(self, record: ClusterSpec | PastCluster) -> None:  # noqa: B027 - most have nothing to do
        """Accept a cluster that was made on another machine. Raises ``BadInput`` if its record cannot be so."""


class UsesMachines(Provider):
    """Makes nodes of machines that are there already."""

    @abstractmethod
    def up(self, request: UpRequest) -> KnownCluster:
        """Make the cluster, or what is missing of it, and wait until its nodes are live.

        Raises ``BadInput`` if a cluster of this name exists and is something that cannot be changed.
        """


class RentsMachines(Provider):
    """Makes machines, which cost money as long as they are there."""

    @abstractmethod
    def rent(self, rental: RentRequest) -> KnownCluster:
        """Make the cluster, or what is missing of it, in the first zone that gives enough machines (see
        ``RentedClusters``)."""

    @abstractmethod
    def repair(self, cluster: str, *, wait_s: float, force: bool = False) -> KnownCluster:
        """Compare the cluster with what was asked for last, and make what is missing, machines too."""

    @abstractmethod
    def kept_buckets(self, cluster: KnownCluster) -> list[KeptBucket]:
        """Buckets that gpuctl made for clusters of this one's name, which ``down`` keeps."""

    @abstractmethod
    def remove_bucket(self, bucket: KeptBucket) -> None:
        """Remove a bucket with everything in it."""


class CanPreempt(ABC):
    """Can end a node as a cloud would that needs its machine."""

    @abstractmethod
    def preempt(self, cluster: KnownCluster, node: str, notice_s: float, replace_after_s: float | None) -> None:
        """Take a node away with a notice, and start another in its place. Returns when that has happened.

        Args:
            cluster: the cluster that the node is of.
            node: name of a node that runs.
            notice_s: seconds from the notice to an end without mercy; 0: no notice, it ends at once.
            replace_after_s: seconds from the end to a replacement; ``None``: there is none.
        """


_PROVIDERS = {
    "local": "gpuctl.stacks.providers.local:LocalProvider",
    "ssh": "gpuctl.stacks.providers.ssh:SshProvider",
    "aws": "gpuctl.stacks.rented.provider:CloudProvider",
    "gcp": "gpuctl.stacks.rented.provider:CloudProvider",
    "azure": "gpuctl.stacks.rented.provider:CloudProvider",
}
"""By name, the class: loaded when it is used, as each brings its own packages."""


def provider(name: str, dialog: Dialog) -> Provider:
    """Raises ``BadInput`` naming the providers there are."""
    if name not in _PROVIDERS:
        raise unknown_provider(name)
    module, _, attribute = _PROVIDERS[name].partition(":")
    made: Provider = getattr(import_module(module), attribute)(name, dialog)
    return made
