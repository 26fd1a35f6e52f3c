"""The part of a node's agent that serves the copies on its disk to the other nodes. Prints its port; ends with its
parent, whose end closes its standard input.

python tests/bench/checkpoint/tier_node.py JOBS TOKEN ADDRESS
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[3])

from gpuctl.bootstrap.agent.replica_server import ReplicaServer


def main(jobs: str, token: str, address: str) -> None:
    print(ReplicaServer(Path(jobs), token).start(address), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
