"""The nearer copies of a job's last checkpoint: on the disk of the node that wrote them, and on that of its neighbour.

The bucket is the truth; a copy only saves the way to it. So nothing depends on one being there, whoever reads one
verifies it as he would what the bucket gave him, and it is written without sync. Each node has

    <node dir>/jobs/<job>/tier/<save>/<part>

where ``<save>`` is a checkpoint's folder in the bucket (``CheckpointEntry.path``) and ``<part>`` the key of one of its
parts with ``+`` for ``/``. A part that a checkpoint shares with the one before is a hard link, so that each ``<save>``
is complete and all others can go once it is committed.

A node's neighbour is the next one in the round, by rank; the agent takes what it is sent, and serves it (see
``replica_server``). Where all of that is, an agent tells its workers in ``$GPUCTL_ROUND_DIR/tiers``.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from gpuctl.cluster.errors import GpuctlError
from gpuctl.cluster.records.rounds import Round

_RESERVE = 0.05
"""Share of a disk that copies leave free: logs and the script's own files matter more."""
SCHEME = "gpuctl"
"""Of the ``Authorization`` of a request to a replica server: the code of ``signed`` follows."""
_SIGNED = ("range", "x-same-as", "content-length")
_SAVE = re.compile(r"(\d+)-r(\d+)\.([0-9a-f]+)-(\d+)")
_PART = re.compile(r"\d+-r\d+\.[0-9a-f]+-\d+\+\d+-\d+")


class ReplicaMap(msgspec.Struct, frozen=True, kw_only=True):
    """Where a round's replicas lie, ``tiers`` in the round's folder on a node."""

    node: str
    folder: str
    """``<node dir>/jobs/<job>/tier``."""
    job: str
    token: str
    neighbour: str | None
    """Node that gets a copy; ``None`` if this is the only one."""
    places: dict[str, str]
    """``address:port`` of each node's tier server."""


def map_of(round_: Round, rank: int, folder: Path, token: str) -> ReplicaMap:
    """The replica map for the node of ``rank`` in ``round_``."""
    members = [member for member in round_.members if member.tier_port]
    names = [member.node for member in members]
    own = round_.members[rank].node
    following = [*names[names.index(own) + 1 :], *names[: names.index(own)]] if own in names else []
    return ReplicaMap(
        node=own,
        folder=str(folder),
        job=round_.job,
        token=token,
        neighbour=following[0] if following else None,
        places={member.node: f"{member.address}:{member.tier_port}" for member in members},
    )


def signed(method: str, path: str, headers: Mapping[str, str]) -> list[str]:
    """What of a request to a replica server its code speaks for. Not a part's bytes: who reads them verifies them."""
    lowered = {name.lower(): value for name, value in headers.items()}
    return [method, path, *(lowered.get(name, "") for name in _SIGNED)]


def path_of(folder: Path, save: str, part: str) -> Path:
    """The path of a part's replica. Raises ``GpuctlError`` for invalid names: they may come from the network."""
    name = part.replace("/", "+")
    if not _SAVE.fullmatch(save) or not _PART.fullmatch(name):
        raise GpuctlError(f"{save}/{name} is not a part of a checkpoint")
    return folder / save / name


def write(path: Path, size: int, chunks: Iterable[bytes | memoryview]) -> None:
    """Put a copy of ``size`` bytes there, whole or not at all. Raises ``OSError``, also before the disk is full."""
    path.parent.mkdir(parents=True, exist_ok=True)
    disk = shutil.disk_usage(path.parent)
    if disk.free < size + _RESERVE * disk.total:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path.parent))
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        with partial.open("wb", buffering=0) as file:
            for chunk in chunks:
                view = memoryview(chunk)
                while len(view):
                    view = view[file.write(view) or 0 :]
        partial.rename(path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def link(path: Path, other: Path) -> bool:
    """Have the copy at ``other`` at ``path`` as well; whether it is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(other, path)
    except FileExistsError:
        return True
    except OSError:  # there is none, or a file system without links
        return False
    return True


def outdated(saves: Iterable[str], committed: str) -> list[str]:
    """Those of the ``saves`` that nobody needs once ``committed`` is: all but itself and what the same processes have
    begun since."""
    number, mark, attempt = _life(committed)
    gone = []
    for save in saves:
        if save != committed:
            other = _life(save) if _SAVE.fullmatch(save) else None
            if other is None or other[:2] != (number, mark) or other[2] < attempt:
                gone.append(save)
    return gone


def _life(save: str) -> tuple[int, str, int]:
    found = _SAVE.fullmatch(save)
    assert found is not None
    return int(found[2]), found[3], int(found[4])
