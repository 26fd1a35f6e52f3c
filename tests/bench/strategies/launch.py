"""Four ranks of a measurement, on machines with wires of their own or on this one."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.bench.network import Network, network_apart

ROOT = Path(__file__).resolve().parents[3]
RANKS = 4
_LIMIT_S = 1800


def ranks(net: Network | None, module: str, *arguments: str) -> Any:
    """What rank 0 of ``python -m module`` prints, as JSON. ``net`` has a machine for each rank; none: all are here."""
    address, device = (net.address(0), "eth0") if net else ("127.0.0.1", "lo")
    env = {
        **{name: value for name, value in os.environ.items() if not name.startswith("GPUCTL_")},
        "WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(_free_port()),
        "GLOO_SOCKET_IFNAME": device,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    with contextlib.ExitStack() as stack:
        processes = []
        for rank in range(RANKS):
            command = [*(net.inside(rank) if net else ()), sys.executable, "-m", module, *arguments]
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**env, "RANK": str(rank)}
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        answer, _ = processes[0].communicate(timeout=_LIMIT_S)
        for rank, process in enumerate(processes):
            if process.wait(timeout=60):
                raise RuntimeError(f"rank {rank} of {module} {' '.join(arguments)} ended with {process.returncode}")
    return json.loads(answer)


def _free_port() -> int:
    """Nobody else is in the namespaces; on this machine, another one may be given the same in theory."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


@contextlib.contextmanager
def machines() -> Iterator[Network]:
    """One for each rank, on a network of its own."""
    with network_apart() as net:
        for _ in range(RANKS):
            net.add()
        yield net
