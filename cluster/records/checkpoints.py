"""What is written of committed checkpoints."""

from __future__ import annotations

from typing import Literal

import msgspec

SaveReason = Literal["asked", "interval", "notice"]
"""What caused a save: the script, the time since the last one, a notice that the machine goes."""


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
    reason: SaveReason = "asked"
    left_s: float | None = None
    """Of one that a notice caused: seconds that were left before the machine would be taken."""
    metrics: dict[str, float] = {}
    """What the script said of this step, for ``best`` in a retention."""
    nodes: tuple[str, ...] = ()
    """Those that had a copy of some of it when it was committed (see ``checkpoints.replica_layout``)."""


class CheckpointIndex(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A value of the ``checkpoints/ledger``: the committed steps, oldest first, and the fence.

    A new round raises ``fence`` before it restores; from then on a commit of a lower round loses (see ``Fenced``).
    """

    fence: int = 0
    entries: tuple[CheckpointEntry, ...] = ()
