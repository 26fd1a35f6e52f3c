"""What is written of files that scripts keep."""

from __future__ import annotations

import msgspec


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


class Snapshot(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A job's folder at one moment: what every node finds in it when the next round starts."""

    round: int
    files: dict[str, StoredFile] = {}
    """By path relative to the folder, with ``/``."""
    at: float = 0.0


class SnapshotIndex(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A value of the ``files/ledger``: the newest snapshots and, to make the next one, what this round's nodes changed.

    ``fence`` is as in ``CheckpointIndex``.
    """

    fence: int = 0
    base: dict[str, StoredFile] = {}
    """What every node of round ``fence`` began with."""
    changes: dict[int, dict[str, StoredFile | None]] = {}
    """By node rank: what differs from ``base`` on that node; ``None`` where it was removed."""
    sets: tuple[Snapshot, ...] = ()
    """Oldest first."""
