"""What is written into the bucket: plain data, as JSON. Never pickled: write access must not be code execution.

Every record is frozen: a change is a new record. Unknown fields are ignored on reading, so that an older agent
understands a newer one. Wall-clock fields (``…_at``, seconds since the epoch) are for people; nothing decides by them.
"""

from __future__ import annotations

from typing import Literal, TypeVar

import msgspec

from gpuctl.cluster.errors import CorruptRecord

T = TypeVar("T")


class Promised(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the nodes' instance type has by its vendor's word, for ``gpuctl verify`` to hold them to."""

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


class Notice(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A cloud's word that it will take a node."""

    lead_s: float
    """Seconds between the notice and the loss, as the cloud promises it."""
    at: float
    source: str = "signal"


class Progress(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How far the workers of one node are, from the file they keep (see ``trainers.metrics``)."""

    job: str
    round: int
    step: int
    loss: float | None = None
    steps_per_s: float | None = None
    at: float = 0.0


class NodeRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``nodes/<node>.json``: a node's heartbeat. It is alive as long as ``beat`` keeps changing."""

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
    """Where the agent serves the copies of checkpoints on its disk (see ``tiers``); 0: it has none."""
    spare_ports: tuple[int, ...] = ()
    """Ports that the agent holds, listening, for the rendezvous of a round it is master of. Each is used once."""
    ready: bool = False
    """The warm interpreter is up: a round that this node joins costs the others no imports."""
    doing: str = ""
    """What keeps it from being ready, for people: such as "pulling debian:12"."""
    notice: Notice | None = None
    health: str = "ok"
    risk: str = ""
    """The cloud's lesser word: why this node may be taken sooner than others. For people; nothing decides by it."""
    stalled: bool = False
    """The workers here have neither made a step nor worked for ``ClusterSpec.stall_minutes``."""
    drainable: bool = False
    """All workers here catch SIGTERM, so stopping them loses no step."""
    progress: Progress | None = None
    rounds: dict[str, int] = {}
    """Only rank 0's: the newest ledger version of each job that is not over. The others watch this one key."""
    line: int = 0
    """Only rank 0's: the newest version of the ``queue/`` ledger it has taken into account."""
    view: dict[str, str] = {}
    """Only rank 0's: how it sees each node ("live", "leaving", "lost"), for ``status``."""
    version: str = ""
    started_at: float = 0.0


class BootReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``boot/<node>.json``: how far a machine is on its way to a node. ``bootstrap.boot`` writes it, as plain JSON."""

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


class Stay(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``stays/<node>.json``: a rented machine, from its boot to its last sign of life. Outlives the cluster."""

    node: str
    type: str
    zone: str
    life: str
    since: float
    until: float


class SshHost(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``hosts/<node>.json``: how a machine of provider ``ssh`` is reached, as its owner's ssh had it at ``up``."""

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


class JobSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``jobs/<job>/spec.json``: what ``gpuctl train`` asked for."""

    job: str
    number: int
    """Position in line."""
    script: str
    """Path of the script, relative to the packed folder."""
    args: tuple[str, ...] = ()
    env: dict[str, str] = {}
    code: str = ""
    """SHA-256 of the packed folder, kept at ``code/<digest>.tar.zst``."""
    nodes_min: int = 1
    nodes_max: int = 1
    nproc: int | None = None
    max_restarts: int = 0
    image: str = ""
    """Container image that the workers run in; empty: the node itself."""
    submitted_at: float = 0.0
    submitted_by: str = ""


class Member(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A node in a round, in rank order."""

    node: str
    incarnation: str
    address: str
    nproc: int
    tier_port: int = 0


Phase = Literal["run", "drain", "wait", "ended"]
Result = Literal["succeeded", "failed", "cancelled"]


class Outcome(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a job ended."""

    result: Result
    exit_code: int
    message: str = ""
    traceback: str = ""


class Round(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An entry of a job's ``rounds/`` ledger: the world the job now lives in.

    ``number`` is the fence. It grows with each new world; the phases of one world (``run``, then ``drain``) share it.
    ``wait`` is a world without members: there are too few nodes, and whoever still runs must stop.
    """

    job: str
    number: int
    phase: Phase
    epoch: int
    """The rank-0 epoch that decided it."""
    members: tuple[Member, ...] = ()
    master_address: str = ""
    master_port: int = 0
    reason: str = ""
    failures: int = 0
    """Times the script itself has failed so far; only these count against ``max_restarts``."""
    drain_s: float = 0.0
    """In phase ``drain``: seconds the workers have for a last checkpoint."""
    outcome: Outcome | None = None
    at: float = 0.0

    def rank_of(self, node: str, incarnation: str) -> int | None:
        """The node's rank in this round (torchrun's group rank), or ``None`` if this life of the node is not in it."""
        for rank, member in enumerate(self.members):
            if (member.node, member.incarnation) == (node, incarnation):
                return rank
        return None


class RankExit(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one worker process ended."""

    rank: int
    local_rank: int
    exit_code: int
    """As the shell has it: 128 + signal number for a process that a signal ended."""
    message: str = ""
    traceback: str = ""
    at: float = 0.0


class NodeExit(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``jobs/<job>/exits/<round>/<node>.json``: how a node's workers ended in one round."""

    job: str
    round: int
    node: str
    incarnation: str
    status: Literal["completed", "drained", "failed", "stopped"]
    """``drained``: they wrote a last checkpoint on request; ``stopped``: the world changed and the agent ended them."""
    last_step: int | None = None
    """The last optimizer step that finished here, for counting steps redone."""
    notice: Notice | None = None
    """Of a node that was about to be taken."""
    left_s: float | None = None
    """With a notice: seconds of it that were left when the workers were gone and what they saved was safe."""
    ranks: tuple[RankExit, ...] = ()
    at: float = 0.0


class CheckpointEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One committed checkpoint."""

    step: int
    round: int
    path: str
    """Key prefix of its manifest and its own parts, below the job's checkpoint folder."""
    digest: str
    """Of its manifest (see ``manifest``)."""
    bytes: int
    """All that it consists of."""
    written: int
    """Those of ``bytes`` that were uploaded for it; the rest belongs to earlier checkpoints as well."""
    world: int
    """How many ranks wrote it."""
    at: float = 0.0
    took_s: float = 0.0
    """From the copy to host memory to this commit."""
    reason: Literal["asked", "interval", "notice"] = "asked"
    left_s: float | None = None
    """Of one that a notice caused: seconds that were left before the machine would be taken."""
    metrics: dict[str, float] = {}
    """What the script said of this step, for ``best`` in a retention."""
    nodes: tuple[str, ...] = ()
    """Those that had a copy of some of it when it was committed (see ``tiers``)."""


class CheckpointLog(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A value of the ``checkpoints/ledger``: the committed steps, oldest first, and the fence.

    A new round raises ``fence`` before it restores; from then on a commit of a lower round loses (see ``Fenced``).
    """

    fence: int = 0
    entries: tuple[CheckpointEntry, ...] = ()


class StoredFile(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One file that a script wrote under ``$GPUCTL_CHECKPOINT_DIR``."""

    size: int = 0
    sha256: str = ""
    blob: str = ""
    """Name of the object that holds it, below the job's ``files/blobs``."""
    modified_ns: int = 0
    """Its mtime, since scripts look for the newest file."""
    link: str = ""
    """Of a symbolic link: where it points, relative to its own folder. It has none of the fields above."""


class FileSet(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The folder of a job at one moment: what every node finds in it when the next round starts."""

    round: int
    files: dict[str, StoredFile] = {}
    """By path relative to the folder, with ``/``."""
    at: float = 0.0


class FileLog(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A value of the ``files/ledger``: the newest sets and, to make the next one, what this round's nodes changed.

    ``fence`` is as in ``CheckpointLog``.
    """

    fence: int = 0
    base: dict[str, StoredFile] = {}
    """What every node of round ``fence`` began with."""
    changes: dict[int, dict[str, StoredFile | None]] = {}
    """By node rank: what differs from ``base`` on that node; ``None`` where it was removed."""
    sets: tuple[FileSet, ...] = ()
    """Oldest first."""


def encode(record: msgspec.Struct) -> bytes:
    return msgspec.json.encode(record)


def decode(data: bytes | msgspec.Raw, kind: type[T], key: str) -> T:
    """Raises ``CorruptRecord`` naming ``key`` and, where the shape is wrong, the field."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError) as error:
        name = getattr(kind, "__name__", str(kind))  # a union has none
        raise CorruptRecord(
            f"{key} is not a {name}: {error}", "was it written by another version of gpuctl?"
        ) from error
