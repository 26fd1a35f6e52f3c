"""Which rank this process is, and among how many."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch.distributed as dist

from gpuctl.cluster.errors import BadInput


@dataclass(frozen=True, slots=True)
class World:
    """This process's place. A plain ``python script.py`` is a world of one."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @classmethod
    def of_env(cls) -> World:
        """As the launcher said it, whether there is a process group or not."""
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


def job_store(prefix: str) -> dist.Store:
    """A connection of its own to the store that the process group was made with. It outlives the group."""
    default = dist.distributed_c10d._get_default_store()
    return dist.PrefixStore(prefix, default.clone())  # type: ignore[attr-defined]  # lacking in torch's stubs
