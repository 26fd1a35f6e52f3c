"""What is written of a cluster as a whole."""

from __future__ import annotations

import msgspec


class Promised(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The hardware of the nodes' instance type according to its vendor, for ``gpuctl verify`` to hold them to."""

    network_gbps: float
    """Between two nodes, by the fastest network, all of its cards together."""
    fabric: str = ""
    """``efa``, ``infiniband``, ``gvnic``, or the usual network."""
    fabric_cards: int = 0


class ClusterSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``cluster.json``: what ``up`` created, enough for any node or laptop to take part."""

    name: str
    provider: str
    nodes_min: int
    nodes_max: int
    id: str = ""
    """The cluster's identity, made once: another cluster of the same name has another (see ``StackRequest.id``)."""
    owner: str = ""
    """Who made it, as ``user@host``."""
    region: str = ""
    """Of a rented cluster: where its machines are looked for by tag if Pulumi's state is gone."""
    account: str = ""
    """Of a rented cluster: the account, project or subscription in which they are looked for."""
    slots: int | None = None
    """Worker processes per node; ``None`` means the GPUs found, else 1."""
    heartbeat_s: float = 1.0
    """Seconds between two heartbeats of a node."""
    lease_s: float = 3.0
    """Seconds without a change of heartbeat after which a node is taken for lost."""
    token: str = ""
    """Shared secret of the nodes' direct questions (see ``peers``)."""
    idle_minutes: float = 15.0
    """Without work, logins and load, after which a rented machine removes itself; 0: never."""
    stall_minutes: float = 30.0
    """Without a step and without work on GPUs or CPUs, after which a job ends; 0: never."""
    created_at: float = 0.0
    promised: Promised | None = None
    """``None``: nobody has promised anything, as on ``local``."""


class PastCluster(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``past.json``: whose the jobs and checkpoints are that a cluster has left. They stay, and so must this."""

    name: str
    provider: str
    id: str = ""
    owner: str = ""
    region: str = ""
    account: str = ""
    """All as in ``ClusterSpec``."""
    ended_at: float = 0.0
    """Seconds since the epoch, by the clock of whoever took the cluster down."""
