"""The last request of ``gpuctl up`` for each rented cluster. An ``up`` that only says what is to change goes on from
it; ``repair`` and ``down`` know by it what there should be.

::

    <state>/pulumi/<cluster>/up.json    LastUp, for this user alone
"""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec

from gpuctl.cluster.atomic_write import write_atomic
from gpuctl.cluster.errors import BadInput, CorruptRecord
from gpuctl.cluster.records.codec import decode
from gpuctl.stacks.request.stack_request import StackRequest
from gpuctl.stacks.state import clusters
from gpuctl.stacks.state.clusters import KnownCluster, command
from gpuctl.stacks.state.paths import private_folder, state_dir


class NodeOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Options of the nodes besides the stack's request."""

    slots: int | None = None
    """Worker processes of each; ``None``: its GPUs, else 1."""
    hold_ill_minutes: float = 0.0
    """See ``NodeSpec``."""
    idle_minutes: float = 15.0
    stall_minutes: float = 30.0
    """Both: see ``records.ClusterSpec``."""
    zones: tuple[str, ...] = ()
    """Those that the user has named; none: whichever has machines. The request's are those of the last attempt."""
    identity: str = ""
    """File on this machine with the private SSH key that logs in to them; empty: ssh knows by itself. In no bucket."""


class LastRequest(msgspec.Struct, frozen=True, kw_only=True):
    request: StackRequest
    terms: NodeOptions
    backend: str = ""
    """URL of where Pulumi's state of it is; empty: a folder on this machine (see ``automation``)."""
    is_done: bool = True
    """That ``up`` came to its end; until then, what it asked for may be there in part."""


def remember(up: LastRequest) -> None:
    path = _path(up.request.cluster)
    private_folder(path.parent)
    write_atomic(path, msgspec.json.encode(up), mode=0o600, durable=True)


def find(cluster: str) -> LastRequest | None:
    """``None``: this user never asked for one of that name, or has taken it away since. Raises ``CorruptRecord``."""
    path = _path(cluster)
    if not path.exists():
        return None
    try:
        return decode(path.read_bytes(), LastRequest, str(path))
    except CorruptRecord as error:
        down = command("down", cluster)
        raise CorruptRecord(error.message, f"`{down}` works without it, by the cluster's tags") from error


def recalled(cluster: str) -> KnownCluster | None:
    """The cluster as this machine knows it: its note of it, or, where that is lost, what was asked for last. Raises
    ``CorruptRecord`` if there is something, and it cannot be read."""
    damaged: CorruptRecord | None = None
    try:
        if (found := clusters.get(cluster)) is not None:
            return found
    except CorruptRecord as error:
        damaged = error
    last = find(cluster)
    if last is not None:
        return noted(last.request)
    if damaged is not None:
        raise damaged
    return None


def noted(request: StackRequest, created_at: float = 0.0) -> KnownCluster:
    """The note of the cluster that ``request`` makes."""
    return KnownCluster(
        name=request.cluster,
        provider=request.provider,
        bucket=request.bucket_url(),
        created_at=created_at,
        id=request.id,
        region=request.region,
        account=request.account,
    )


def of(cluster: str) -> LastRequest:
    """Raises ``BadInput`` if there is none."""
    found = find(cluster)
    if found is None:
        raise BadInput(f"{cluster} was not created on this machine", "use the machine that has its Pulumi state")
    return found


def forget_all(cluster: str) -> None:
    """Forget a cluster that is gone, with its Pulumi state if that is on this machine."""
    shutil.rmtree(_path(cluster).parent, ignore_errors=True)


def _path(cluster: str) -> Path:
    return state_dir() / "pulumi" / cluster / "up.json"
