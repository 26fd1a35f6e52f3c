"""``from gpuctl import mingle``: wait until all nodes of a run are there, and learn one's own place among them.

    from gpuctl import mingle

    place = mingle("my-run", nodes=4, bucket="s3://my-bucket/lab")
    os.environ.update(place.variables())
    torch.distributed.init_process_group()

Each node makes the same call, in any order and at any time; it returns on all of them once all are there. In a notebook
it can be interrupted as any cell; the others are told.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable

from gpuctl.bootstrap.rendezvous.command import Meeting
from gpuctl.bootstrap.rendezvous.own_address import own_address
from gpuctl.bootstrap.rendezvous.participant import Attendee
from gpuctl.bootstrap.rendezvous.placement import Placement, placement_of
from gpuctl.bootstrap.rendezvous.runs import RunRequest
from gpuctl.bootstrap.rendezvous.session import Session
from gpuctl.cluster.clock import SystemClock
from gpuctl.cluster.errors import BadInput, GpuctlError
from gpuctl.cluster.records.rounds import Round
from gpuctl.cluster.storage.bucket import Bucket, open_bucket


def mingle(
    id: str,  # noqa: A002 - what people call it, and its flag
    nodes: int,
    *,
    bucket: str | None = None,
    rank: int | None = None,
    timeout: float | None = None,
    address: str | None = None,
    port: int = 0,
    say: Callable[[str], None] | None = None,
) -> Placement:
    """Wait until all nodes of a run are there; returns this node's place among them.

    Args:
        id: The run's name, the same on all nodes: letters, digits, dots, dashes, underscores.
        nodes: How many nodes meet.
        bucket: URL of a bucket or of a folder that all nodes see; by default ``$GPUCTL_BUCKET``.
        rank: This node's rank, if it is not to be chosen for it.
        timeout: Seconds to wait at most.
        address: By which address the others reach this node; by default that of the interface that leads out.
        port: Port of the rendezvous if this node becomes rank 0; by default one that is free.
        say: Is called with each line of progress; by default they go to standard error.

    Raises:
        GpuctlError: What is wrong, and what to do about it: ``NotAllHere`` after ``timeout``, ``BadInput`` for an
            argument, a run of another size under this ID, or a rank that somebody else has.
    """
    _refuse_unusable(nodes, timeout, port)
    url = bucket or os.environ.get("GPUCTL_BUCKET")
    if not url:
        raise BadInput("no bucket is given", "pass bucket=URL, or set GPUCTL_BUCKET")
    request = RunRequest(id, nodes, nodes, host=host_name())
    attendee = Attendee(request.host, own_address(address), checked_rank(rank, nodes, nodes), port)
    return meet(open_bucket(url), request, attendee, timeout, say or _say)


def meet(
    bucket: Bucket, request: RunRequest, attendee: Attendee, timeout_s: float | None, say: Callable[[str], None]
) -> Placement:
    """Wait until all nodes are there, and all know it. Raises as ``Session.stay`` does."""
    clock = SystemClock()
    places: list[Placement] = []

    def begin(round_: Round, rank: int, on_end: Callable[[], None]) -> Meeting:  # noqa: ARG001
        places.append(placement_of(round_, rank))
        return Meeting(round_, rank, clock)

    outcome = Session(bucket, request, attendee, begin, clock, say, timeout_s).stay()
    if outcome is None or outcome.result != "succeeded" or not places:
        message = outcome.message if outcome else "this node has left"
        error = GpuctlError(f"{request.id} did not come together: {message}")
        error.exit_code = (outcome.exit_code if outcome else 0) or 1
        raise error
    return places[-1]


def checked_rank(rank: int | None, nodes_min: int, nodes_max: int) -> int | None:
    """Raises ``BadInput`` for a rank that a run of this size cannot have."""
    if rank is None:
        return None
    if not isinstance(rank, int):
        raise BadInput(f"rank={rank!r} is not a whole number", "use, for example, int(os.environ['RANK'])")
    if nodes_min != nodes_max:
        raise BadInput(
            f"--rank {rank} needs a fixed number of nodes, not {nodes_min}:{nodes_max}",
            "leave out --rank: ranks change when nodes come and go",
        )
    if not 0 <= rank < nodes_max:
        raise BadInput(f"--rank {rank} is not below the number of nodes, {nodes_max}", "ranks count from 0")
    return rank


def _refuse_unusable(nodes: object, timeout: object, port: object) -> None:
    """What a program hands over is not what a command line has parsed: it would be written down for all nodes."""
    if not isinstance(nodes, int) or isinstance(nodes, bool) or nodes < 1:
        raise BadInput(f"nodes={nodes!r} is not a number of nodes", "use a whole number, 1 or more")
    if timeout is not None and not (isinstance(timeout, (int, float)) and timeout >= 0):
        raise BadInput(f"timeout={timeout!r} is not a number of seconds", "use 0 or more, or None")
    if not isinstance(port, int) or not 0 <= port <= 65535:
        raise BadInput(f"port={port!r} is not a port", "use 1 to 65535, or 0 for one that is free")


def host_name() -> str:
    """This machine's name without its domain; a pod's is that of the pod."""
    return socket.gethostname().partition(".")[0]


def _say(line: str) -> None:
    print(f"mingle: {line}", file=sys.stderr, flush=True)
