"""Which rank this process is, and among how many."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from gpuctl.cluster.errors import BadInput
from gpuctl.trainers import gloo_exit


@dataclass(frozen=True, slots=True)
class World:
    """This process's place in the job. A plain ``python script.py`` is a world of one."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @classmethod
    def of_env(cls) -> World:
        """The world as the launcher's environment describes it, whether there is a process group or not."""
        env = os.environ
        return cls(int(env.get("RANK", "0")), int(env.get("WORLD_SIZE", "1")), int(env.get("LOCAL_RANK", "0")))

    @classmethod
    def now(cls) -> World:
        """Raises ``BadInput`` in a worker of several that has not joined its process group yet."""
        told = cls.of_env()
        if dist.is_available() and dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size(), told.local_rank)
        if told.size > 1:
            raise BadInput(
                "this is one of several workers, but it has no process group yet",
                "call torch.distributed.init_process_group() first",
            )
        return told


def join_process_group(alone: bool) -> torch.device:
    """This rank's device; the process group is made if a launcher started several workers and the script made none.

    ``alone``: also one of this process alone, if nobody started others.
    """
    world = World.of_env()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", world.local_rank)
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "WORLD_SIZE" in os.environ and world.size > 1 and not dist.is_initialized():
        dist.init_process_group(backend)
        gloo_exit.install()
    elif alone and not dist.is_initialized():
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        gloo_exit.install()
    return device


def job_store(name: str, patience: timedelta | None = None) -> dist.Store:
    """A connection of its own to the store that the job's workers meet in. It outlives the process group.

    The keys are this start's own: a restart of the workers meets a store that may have lived on. ``patience`` is how
    long a wait may take; None for as long as in the process group.
    """
    if dist.is_initialized():
        default = dist.distributed_c10d._get_default_store()
        store = default.clone()  # type: ignore[attr-defined]  # lacking in torch's stubs
        if patience is not None:
            store.set_timeout(patience)
    else:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(host, port, is_master=False, timeout=patience or dist.default_pg_timeout)
    number, restart = os.environ.get("GPUCTL_ROUND", "0"), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"gpuctl/{name}/{number}/{restart}", store)
