"""PyTorch: what torchrun tells its workers (``torch/distributed/elastic/agent/server/local_elastic_agent.py``).

This is for ``gpuctl mingle``. A cluster's agent runs torchrun's launcher itself (``trainers.launchers.torchrun``).
"""

from __future__ import annotations

from gpuctl.trainers.launchers.adapter import Launcher, Process


def variables(process: Process) -> dict[str, str]:
    world = process.world
    return {
        "ROLE_RANK": str(process.rank),
        "ROLE_WORLD_SIZE": str(world.size),
        "ROLE_NAME": "default",
        "TORCHELASTIC_RUN_ID": f"{world.job}-{world.round}",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }


LAUNCHER = Launcher(
    "torchrun",
    variables,
    needs="torch",
    install="pip install torch",
    one_per_node=False,
    ends_softly=True,
)
