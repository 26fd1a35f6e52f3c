"""What ``gpuctl up`` was asked for last, of each rented cluster. An ``up`` that only says what is to change goes on
from it; ``repair`` and ``down`` know by it what there should be.

::

    <state>/pulumi/<cluster>/up.json    LastUp, for this user alone
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from gpuctl.cluster.errors import BadInput
from gpuctl.cluster.records import decode
from gpuctl.stacks.known import state_dir, write_private
from gpuctl.stacks.passphrase import private_folder
from gpuctl.stacks.request import StackRequest


class NodeTerms(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What nodes are told besides where they are."""

    slots: int | None = None
    """Worker processes of each; ``None``: its GPUs, else 1."""
    idle_minutes: float = 15.0
    stall_minutes: float = 30.0
    """Both: see ``records.ClusterSpec``."""


class LastUp(msgspec.Struct, frozen=True, kw_only=True):
    request: StackRequest
    terms: NodeTerms
    backend: str = ""
    """URL of where Pulumi's state of it is; empty: a folder on this machine (see ``engine``)."""


def remember(up: LastUp) -> None:
    path = _path(up.request.cluster)
    private_folder(path.parent)
    write_private(path, msgspec.json.encode(up))


def find(cluster: str) -> LastUp | None:
    """``None``: this user never asked for one of that name, or has taken it away since."""
    path = _path(cluster)
    return decode(path.read_bytes(), LastUp, str(path)) if path.exists() else None


def of(cluster: str) -> LastUp:
    """Raises ``BadInput`` if there is none."""
    found = find(cluster)
    if found is None:
        raise BadInput(f"{cluster} was not made on this machine", "go to the one that its Pulumi state is on")
    return found


def forget(cluster: str) -> None:
    _path(cluster).unlink(missing_ok=True)


def _path(cluster: str) -> Path:
    return state_dir() / "pulumi" / cluster / "up.json"
