"""Real worker processes in a process group, started in a fraction of a second: forked from a server that has torch.

The test process serves the store of the rendezvous, as torchrun's agent does.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import pickle
import signal
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any

import torch
import torch.distributed as dist

from gpuctl.trainers.launchers.torchrun import die_with_parent
from tests.waiting import PATIENCE_S

_FORKING = multiprocessing.get_context("forkserver")
# pytest is the main module of this process, which each child imports; an optimizer's first step imports torch._dynamo.
_FORKING.set_forkserver_preload(
    ["pytest", "gpuctl.trainers.trainer", "torch._dynamo", "tests.trainers.rank_scripts.checkpointing"]
)

Body = Callable[..., Any]
"""What each rank runs: a function of a module, called with the arguments given."""


@dataclass(frozen=True)
class Ended:
    """How a rank ended: its exit code (negative: the signal), what ``body`` returned or raised, and its stderr."""

    code: int
    value: Any = None
    error: BaseException | None = None
    said: str = ""


class Ranks:
    """``world`` ranks that run ``body``, in a gloo group if they are more than one. Ends them when left."""

    def __init__(self, world: int, body: Body, *arguments: Any, env: Mapping[str, str] | None = None) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._ranks: list[tuple[ForkServerProcess, Connection]] = []
        for rank in range(world):
            told = {
                "CUDA_VISIBLE_DEVICES": "",  # more ranks than GPUs, and tests compare with what a CPU computes
                **(env or {}),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self._store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
            }
            ours, theirs = _FORKING.Pipe(duplex=False)
            process = _FORKING.Process(target=_rank, args=(told, body, arguments, theirs))
            process.start()
            # Else the start of another one, in another thread, may take its exit code before we do.
            multiprocessing.process._children.discard(process)  # type: ignore[attr-defined]
            theirs.close()
            self._ranks.append((process, ours))

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process, _pipe in self._ranks:
            if process.is_alive():
                process.kill()
            process.join()

    def pid(self, rank: int) -> int:
        pid = self._ranks[rank][0].pid
        assert pid is not None
        return pid

    def send(self, rank: int, number: signal.Signals) -> None:
        os.kill(self.pid(rank), number)

    def wait(
        self, timeout_s: float = PATIENCE_S, first: int | None = None, notices_after_s: float = 0.0
    ) -> list[Ended]:
        """All of them, in rank order; fails if one does not end in time. If rank ``first`` was killed, the others are
        killed too, as a launcher does, which looks every so often."""
        if first is not None:
            self._ranks[first][0].join(timeout_s)
            if (self._ranks[first][0].exitcode or 0) < 0:
                for process, _pipe in self._ranks:
                    process.join(notices_after_s)
                    process.kill()
        ended = []
        for rank, (process, pipe) in enumerate(self._ranks):
            # What a rank has to say comes before its end, and may be more than a pipe holds.
            try:
                told = pickle.loads(pipe.recv_bytes()) if pipe.poll(timeout_s) else (None, None, "")
            except EOFError:
                told = (None, None, "")
            process.join(timeout_s)
            assert process.exitcode is not None, f"rank {rank} does not end"
            ended.append(Ended(process.exitcode, *told))
        return ended


def run(world: int, body: Body, *arguments: Any, env: Mapping[str, str] | None = None) -> list[Any]:
    """What ``body`` returned on each rank; fails with the first rank's traceback if one raised or was killed."""
    with Ranks(world, body, *arguments, env=env) as ranks:
        ended = ranks.wait()
    for rank, end in enumerate(ended):
        assert end.code == 0, f"rank {rank} ended with {end.code}: {end.said}"
    return [end.value for end in ended]


def _rank(env: dict[str, str], body: Body, arguments: tuple[Any, ...], pipe: Connection) -> None:
    die_with_parent()  # the server ends with pytest, however that ends
    for name in [name for name in os.environ if name.startswith("GPUCTL_")]:
        del os.environ[name]
    os.environ.update(env)
    torch.set_num_threads(1)
    if env["WORLD_SIZE"] != "1":
        dist.init_process_group("gloo")
        dist.barrier()  # else one that raises at once ends while another one has yet to connect to it
    value, raised, left = None, None, None
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            value = body(*arguments)
        except SystemExit as error:
            left = error
        except Exception as error:  # noqa: BLE001 - the test judges it
            raised = error
            traceback.print_exc()
    # Not send(), whose tensors stay in a memory that goes with this process.
    pipe.send_bytes(pickle.dumps((value, raised, said.getvalue())))
    if raised is not None:
        raise SystemExit(1)
    if left is not None:
        raise left
