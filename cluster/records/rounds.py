"""What is written of a job's rounds, and how ranks ended."""

from __future__ import annotations

from typing import Literal

import msgspec

from gpuctl.cluster.records.nodes import PreemptionNotice


class Member(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A node in a round, in rank order."""

    node: str
    incarnation: str
    address: str
    nproc: int
    tier_port: int = 0


Phase = Literal["run", "drain", "wait", "ended"]
Result = Literal["succeeded", "failed", "cancelled"]


class JobOutcome(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a job ended."""

    result: Result
    exit_code: int
    message: str = ""
    traceback: str = ""
    hint: str = ""
    """What to do about it, or would have been."""


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
    outcome: JobOutcome | None = None
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
    signal: str = ""
    """Name of that signal; empty for a process that ended by itself."""
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
    notice: PreemptionNotice | None = None
    """Of a node that was about to be taken."""
    left_s: float | None = None
    """With a notice: seconds of it that were left when the workers were gone and what they saved was safe."""
    ranks: tuple[RankExit, ...] = ()
    ill: str = ""
    """Of a node whose workers failed: what is wrong with its GPUs (see ``NodeRecord.health``)."""
    at: float = 0.0
