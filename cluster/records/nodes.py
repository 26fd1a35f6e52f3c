"""What is written of nodes, and of the machines below them."""

from __future__ import annotations

from typing import Literal

import msgspec


class PreemptionNotice(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A cloud's notice that it will take a node."""

    lead_s: float
    """Seconds between the notice and the loss, as the cloud promises it."""
    at: float
    source: str = "signal"


class TrainingProgress(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How far the workers of one node are, from the file they keep (see ``trainers.metrics``)."""

    job: str
    round: int
    step: int
    loss: float | None = None
    steps_per_s: float | None = None
    steps: int | None = None
    """Of the whole training, where the script has told."""
    at: float = 0.0


class NodeRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A node's heartbeat, ``nodes/<node>.json``. The node is alive as long as ``beat`` keeps changing."""

    node: str
    incarnation: str
    """Changes whenever the agent starts anew: a restarted agent has lost its workers, so it is another member."""
    beat: int
    address: str
    port: int
    """Where the agent answers direct questions (see ``peers``)."""
    slots: int = 1
    devices: tuple[str, ...] = ()
    tier_port: int = 0
    """Where the agent serves the copies of checkpoints on its disk (see ``replica_layout``); 0: it has none."""
    spare_ports: tuple[int, ...] = ()
    """Ports that the agent holds, listening, for the rendezvous of a round it is master of. Each is used once."""
    master_port: int = 0
    """The only port that the rendezvous of a round may use here, each time; 0: one of ``spare_ports``."""
    ready: bool = False
    """The warm interpreter is up: a round that this node joins costs the others no imports."""
    doing: str = ""
    """What keeps it from being ready, for people: such as "pulling debian:12"."""
    trouble: str = ""
    """What is wrong there and recovers once its cause is gone, for people: such as a full disk."""
    notice: PreemptionNotice | None = None
    health: str = "ok"
    """Or what is wrong with its GPUs, such as "GPU 3: it has fallen off the bus": no round uses it any more, until its
    agent begins anew."""
    risk: str = ""
    """The cloud's lesser word: why this node may be taken sooner than others. For people; nothing decides by it."""
    stalled: bool = False
    """The workers here have neither made a step nor worked for ``ClusterSpec.stall_minutes``."""
    still_s: float = 0.0
    """Seconds since the workers here last made a step or worked, as of the last look (every 10 s)."""
    ranks_left: tuple[int, ...] | None = None
    """Local ranks of the workers here that have not ended; ``None``: they have not begun, or nobody can tell."""
    drainable: bool = False
    """All workers here catch SIGTERM, so stopping them loses no step."""
    progress: TrainingProgress | None = None
    rounds: dict[str, int] = {}
    """Only rank 0's: the newest ledger version of each job that is not over. The others watch this one key."""
    line: int = 0
    """Only rank 0's: the newest version of the ``queue/`` ledger it has taken into account."""
    view: dict[str, str] = {}
    """Only rank 0's: how it sees each node ("live", "leaving", "lost"), for ``status``."""
    version: str = ""
    started_at: float = 0.0
    lease_s: float = 0.0
    """Seconds without a new beat after which the node is taken for lost; 0: ``ClusterSpec.lease_s``. Of one that waits,
    and says so less often."""
    rank: int | None = None
    """The rank that whoever started it has chosen; ``None``: any."""
    host: str = ""
    """Name of the machine, for people, where the node's own is another."""


class BootReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The progress of a machine's boot, ``boot/<node>.json``. ``bootstrap.boot`` writes it, as plain JSON."""

    node: str
    state: Literal["booting", "ready", "failed"]
    step: str = ""
    """The one that runs, or that failed."""
    reason: str = ""
    """Of a failure, a line."""
    at: float = 0.0
    """When this was written, in seconds since the epoch by the machine's clock."""
    address: str = ""
    public_address: str = ""
    host_keys: tuple[str, ...] = ()
    """What sshd shows there, as ``ssh-ed25519 AAAA…``."""
    user: str = ""
    """Who logs in there."""
    type: str = ""
    """Instance type, zone, and ``spot`` or ``on-demand``, by the cloud's metadata: what its price goes by."""
    zone: str = ""
    life: str = ""
    booted_at: float = 0.0


class MachineUsage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The usage of a rented machine, from boot to last heartbeat, ``stays/<node>.json``. Outlives the cluster."""

    node: str
    type: str
    zone: str
    life: str
    since: float
    until: float


class SshHost(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a machine of provider ``ssh`` is reached, ``hosts/<node>.json``, as its owner's ssh had it at ``up``."""

    node: str
    target: str
    """What ``--hosts`` called it."""
    host: str
    port: int = 22
    user: str = ""
    jump: str = ""
    """Machines on the way, as ssh's ``ProxyJump`` has them."""
    identities: tuple[str, ...] = ()
    """Files with the keys that log in; elsewhere than on its owner's machine they may be missing."""
    host_keys: tuple[str, ...] = ()
    """Those that its owner's ssh knew it by."""
    dropped: bool = False
    """A later ``up`` did not name it, and gpuctl may still be on it: it is no member, and remembered to be left."""


class Rank0(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An entry of the ``rank0/`` ledger. Its version is the epoch: a higher one has deposed all lower ones."""

    node: str
    incarnation: str
    address: str
    port: int
