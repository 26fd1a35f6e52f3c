"""JAX: ``jax.distributed`` (``jax/_src/distributed.py``).

JAX itself reads the coordinator's address alone. ``trainers.jax_world`` tells ``jax.distributed.initialize`` the rest,
in each worker, so that a script calls it without arguments.
"""

from __future__ import annotations

import signal

from gpuctl.trainers.launchers.adapter import Launcher, Process, joined


def variables(process: Process) -> dict[str, str]:
    world = process.world
    found = {
        "JAX_COORDINATOR_ADDRESS": joined(world.master_address, world.master_port),
        "JAX_NUM_PROCESSES": str(world.size),
        "JAX_PROCESS_ID": str(process.rank),
        # Its SIGTERM handler, without which that signal means what it always does; for those who use sync points.
        "JAX_ENABLE_PREEMPTION_SERVICE": process.env.get("JAX_ENABLE_PREEMPTION_SERVICE", "0"),
    }
    if world.nproc > 1:
        found["JAX_LOCAL_DEVICE_IDS"] = str(process.local_rank)
    return found


LAUNCHER = Launcher(
    "jax", variables, needs="jax", install="pip install 'jax[cuda13]' (or jax, for CPUs)", stop=signal.SIGUSR1
)
