"""What a machine is told when it first boots: all that ``user_data`` puts into user-data, and no secret.

On the machine it is ``/etc/gpuctl/node.json``. ``bootstrap.boot`` reads it there as plain JSON, for it runs before
gpuctl and its packages are installed.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Fabric = Literal["", "efa", "infiniband", "gvnic"]
Host = Literal["aws", "gcp", "azure", "ssh"]
"""Who answers for the machine: whose metadata it asks, whose shrink call it makes. ``ssh``: it was there before."""

AGENT_STOP_S = 140.0
"""What a shutdown gives the agent where no cloud ends the machine earlier: the ``TimeoutStopSec`` of its service, less
a few seconds for leaving."""


class Promise(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The hardware that the instance type should have, for the health gate; a machine with less is never ready."""

    gpus: int = 0
    gpu_memory_gb: float = 0.0
    """Of each GPU."""
    fabric: Fabric = ""
    fabric_cards: int = 0


class Package(msgspec.Struct, frozen=True, kw_only=True):
    """The gpuctl package that nodes install: what ``up`` has put into the bucket."""

    wheel: str
    """Key below the cluster's prefix, ``boot/<sha256>/gpuctl-….whl``."""
    sha256: str
    constraints: str
    """Key of the pins, ``boot/<sha256>/constraints.txt``."""
    constraints_sha256: str
    extras: tuple[str, ...] = ("train",)


class NodeSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The settings of a node, in ``/etc/gpuctl/node.json``."""

    cluster: str
    provider: Host
    bucket: str
    """URL of the cluster's prefix, without credentials: the machine has its own."""
    package: Package
    promise: Promise = Promise()
    region: str = ""
    type: str = ""
    """What gpuctl's catalog calls the machine, GPUs that are hung on it included; empty: what the cloud calls it."""
    node: str = ""
    """Empty: what the machine calls itself (its instance id)."""
    address: str = ""
    """Empty: that of the interface which leads out. Of ``ssh``, where none does: the one that ``up`` came to."""
    idle_minutes: float = 15.0
    """Without work, logins and load, after which the machine removes itself; 0: never."""
    hold_ill_minutes: float = 0.0
    """For which a machine that is ill stays for a look, from the last login on, before it is replaced."""
    notice_s: float = 30.0
    """Between the cloud's notice and the end, where a notice does not say so itself (Google's)."""
    shutdown_s: float = 30.0
    """Between the beginning of a shutdown and the end of the machine; see ``Cloud.shutdown_s``."""
    unhealthy_minutes: float = 10.0
    """Between a boot that failed and the machine's removing itself: time to log in and look."""
    env: dict[str, str] = {}
    """Variables of the agent and of every worker, such as the address of a closed network's package index."""
    sources: dict[str, str] = {}
    """Addresses of package repositories that are used in place of the usual ones (see ``boot.install``)."""
