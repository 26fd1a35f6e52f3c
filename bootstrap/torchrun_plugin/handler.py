"""``--rdzv-backend=gpuctl``: what torchrun asks of a rendezvous, answered by gpuctl's rounds.

    torchrun --rdzv-backend=gpuctl --rdzv-endpoint=s3://bucket/prefix --rdzv-id=RUN --nnodes=2:4 … train.py

Each round has a store of its own, on rank 0's host of that round, at a port that rank 0 has kept free for it. So no
node holds what the others cannot go on without, and nothing of an earlier round is taken for this one's.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from datetime import timedelta
from typing import NoReturn

from torch.distributed import DistError, Store, TCPStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from gpuctl.bootstrap.rendezvous.mingle import host_name
from gpuctl.bootstrap.rendezvous.own_address import own_address
from gpuctl.bootstrap.rendezvous.participant import Attendee
from gpuctl.bootstrap.rendezvous.placement import INTERFACES, placement_of
from gpuctl.bootstrap.rendezvous.runs import RunRequest
from gpuctl.bootstrap.rendezvous.session import NotAllHere
from gpuctl.bootstrap.torchrun_plugin import agent_patch
from gpuctl.bootstrap.torchrun_plugin.elastic_node import ElasticNode, RoundPart
from gpuctl.cluster.errors import BadInput, GpuctlError
from gpuctl.cluster.records.rounds import RankExit
from gpuctl.cluster.storage.bucket import open_bucket

BACKEND = "gpuctl"
_DOUBT_S = 4.0
"""After workers have failed: for a lost node to be known as such. A silent one is after two seconds and some."""
_STORE_S = 60.0
_HOST_S = 3.0
"""For rank 0 to have its store. torch's listens at all addresses, and what was kept is kept at one: whoever has
that port at another address, if only for a connection, is in the way for as long as that lasts."""
_LOOK_S = 0.1


def created(params: RendezvousParameters) -> RendezvousHandler:
    """The handler for one torchrun. What is wrong with its flags ends torchrun with one line."""
    try:
        return Rendezvous(params)
    except GpuctlError as error:
        sys.exit(f"error: {error}")


class Rendezvous(RendezvousHandler):
    """torchrun's part in a run of gpuctl. For the thread of torchrun's agent alone."""

    def __init__(self, params: RendezvousParameters) -> None:
        """Raises ``GpuctlError`` for flags that cannot be, and a torch that is too old."""
        agent_patch.install(Rendezvous)
        if not params.endpoint:
            raise BadInput("--rdzv-endpoint is missing", "name a bucket: --rdzv-endpoint=s3://my-bucket/lab")
        if not params.run_id or params.run_id == "none":  # torchrun's own, where there is none
            raise BadInput("--rdzv-id is missing", "choose a name that all nodes of the run give")
        timeout_s = _patience_s(params)
        request = RunRequest(params.run_id, params.min_nodes, params.max_nodes, host=host_name())
        attendee = Attendee(request.host, own_address(params.local_addr))
        bucket = open_bucket(params.endpoint, patience_s=3.0, timeout_s=5.0)
        self._run_id = request.id
        self._node = ElasticNode(bucket, request, attendee, timeout_s, _say)
        self._given = {name: os.environ.get(name, "") for name in INTERFACES}
        self._failure: RankExit | None = None
        self._store: Store | None = None

    # -- for torchrun -------------------------------------------------------------------------------------------------

    def get_backend(self) -> str:
        return BACKEND

    def get_run_id(self) -> str:
        return self._run_id

    @property
    def use_agent_store(self) -> bool:
        """The workers share the store, so that they need no port of their own."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        while True:
            self._store = None  # rank 0's server of the round before ends with it
            part = self._node.next_part()
            if part is None:
                self._end()
            if (store := self._store_of(part)) is not None:
                self._store = store
                self._choose_interface(part)
                where = RendezvousStoreInfo(part.round.master_address, part.round.master_port)
                return RendezvousInfo(store, part.rank, len(part.round.members), where)

    def num_nodes_waiting(self) -> int:
        """1: there is another round. The agent then restarts its workers, which counts as no failure."""
        if self._node.has_ended:
            self._end()
        part = self._node.part
        return int(part is not None and part.is_over)

    def is_closed(self) -> bool:
        return self._node.has_ended

    def set_closed(self) -> None:
        """A run ends when its nodes have done their work, or one of them gives up."""

    def shutdown(self) -> bool:
        """The agent has ended: well, or not."""
        part = self._node.part
        if part is not None and self._failure is not None:
            part.ends("failed", self._failure)
        else:
            self._node.take_notice("torchrun has ended")
        self._node.leave()
        return True

    # -- for the patch of the agent -----------------------------------------------------------------------------------

    def judged(self, result: RunResult) -> RunResult:
        """How the workers did, once it is known whether the world has changed: what ended them then is no failure, and
        who is done early may be needed again."""
        part = self._node.part
        if part is None:
            return result
        if result.state == WorkerState.SUCCEEDED:
            part.ends("completed")
            return _HEALTHY if self._node.is_over(None) else result
        if result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY):
            if self._node.is_over(_DOUBT_S):
                return _HEALTHY
            self._failure = _first(result, part)
        return result

    def has_changed(self) -> bool:
        """After an error of the store: whether its host is lost, and the next round is to come."""
        return self._node.is_over(_DOUBT_S)

    def take_notice(self, source: str) -> None:
        """The agent is to end, and stops its workers next."""
        self._node.take_notice(source)

    def leave(self) -> None:
        """Its workers have ended."""
        self._node.leave()

    # -- the rest -----------------------------------------------------------------------------------------------------

    def _store_of(self, part: RoundPart) -> Store | None:
        """The round's store; ``None`` if the round is over before it is there, or rank 0 cannot have it at that port:
        then it leaves this round, and the next one has another port."""
        address, port, size = part.round.master_address, part.round.master_port, len(part.round.members)
        timeout = timedelta(seconds=_STORE_S)
        deadline = time.monotonic() + _HOST_S
        while not part.is_over and not self._node.has_ended:
            with contextlib.suppress(DistError):
                if part.rank == 0:
                    return TCPStore(address, port, size, is_master=True, timeout=timeout, wait_for_workers=False)
                if _listens(address, port):
                    return TCPStore(address, port, size, is_master=False, timeout=timeout, wait_for_workers=False)
            if part.rank == 0 and time.monotonic() > deadline:
                _say(f"port {port} is in use at another address of this host; the next round has another one")
                return None
            self._node.is_over(_LOOK_S)
        return None

    def _choose_interface(self, part: RoundPart) -> None:
        """For the workers, which inherit this process's environment: gloo would take the address of the host's name,
        which is often none that others reach."""
        found = placement_of(part.round, part.rank).variables(self._given)
        os.environ.update({name: found[name] for name in INTERFACES if name in found})

    def _end(self) -> NoReturn:
        """Leave torchrun's loop: the run is over, for all or for this node."""
        error, outcome = self._node.error, self._node.outcome
        if isinstance(error, NotAllHere):
            raise RendezvousTimeoutError(f"{error.message}; raise --rdzv-conf timeout=SECONDS to wait longer")
        if isinstance(error, BadInput):
            sys.exit(f"error: {error}")
        if error is not None:
            raise RendezvousConnectionError(str(error)) from error
        if outcome is not None and outcome.result == "succeeded":
            sys.exit(0)  # a spare, or one that came when all was done
        raise RendezvousClosedError(f"run {self._run_id} {outcome.result}: {outcome.message}" if outcome else "left")


_HEALTHY = RunResult(state=WorkerState.HEALTHY)


def _patience_s(params: RendezvousParameters) -> int | None:
    """How long to wait for enough nodes; ``None``: for ever."""
    try:
        given: int | None = params.get_as_int("timeout")
    except ValueError:
        given = 0
    if given is not None and given <= 0:
        raise BadInput(
            f"--rdzv-conf timeout={params.get('timeout')} is not a number of seconds", "for example timeout=600"
        )
    return given


def _first(result: RunResult, part: RoundPart) -> RankExit:
    rank, failure = min(result.failures.items(), key=lambda one: one[1].timestamp, default=(part.rank, None))
    code = failure.exitcode if failure is not None else 1
    name = failure.signal_name() if failure is not None and code < 0 else ""
    return RankExit(rank=rank, local_rank=0, exit_code=code if code > 0 else 128 - code, signal=name)


def _listens(address: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=1.0):
        return True
    return False


def _say(line: str) -> None:
    print(f"gpuctl: {line}", file=sys.stderr, flush=True)
