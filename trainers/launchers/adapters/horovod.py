"""Horovod on gloo, without ``horovodrun``: its ranks meet at a key-value store, which is ours
(``horovod/common/gloo/gloo_context.cc``, ``horovod/runner/gloo_run.py``).
"""

from __future__ import annotations

import ipaddress
import signal

from gpuctl.trainers.launchers.adapter import Launcher, Process

_TIMEOUT_S = "30"
"""Also of a single collective: a rank that is silent for longer has the others fail."""


def variables(process: Process) -> dict[str, str]:
    world = process.world
    alike = [node for node, nproc in enumerate(world.nprocs) if nproc > process.local_rank]
    found = {
        "HOROVOD_RANK": str(process.rank),
        "HOROVOD_SIZE": str(world.size),
        "HOROVOD_LOCAL_RANK": str(process.local_rank),
        "HOROVOD_LOCAL_SIZE": str(world.nproc),
        "HOROVOD_CROSS_RANK": str(alike.index(world.rank)),
        "HOROVOD_CROSS_SIZE": str(len(alike)),
        "HOROVOD_HOSTNAME": f"node-{world.rank}",  # only a name, by which the ranks of a node find each other
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": world.master_address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(world.master_port),
        "HOROVOD_GLOO_TIMEOUT_SECONDS": process.env.get("HOROVOD_GLOO_TIMEOUT_SECONDS", _TIMEOUT_S),
    }
    if interface := _interface(process):
        found["HOROVOD_GLOO_IFACE"] = interface
    return found


def _interface(process: Process) -> str:
    given = process.env.get("HOROVOD_GLOO_IFACE") or process.env.get("GLOO_SOCKET_IFNAME", "")
    here = process.world.hosts[process.world.rank]
    return "lo" if not given and ipaddress.ip_address(here).is_loopback else given


LAUNCHER = Launcher(
    "horovod",
    variables,
    needs="horovod",
    install="see docs/guides/frameworks.md, since there is no wheel",
    one_per_node=False,
    stop=signal.SIGUSR1,
    meets=True,
)
