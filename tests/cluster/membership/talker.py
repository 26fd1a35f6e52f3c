"""A process with ``Peers`` and nothing else: ``python talker.py ADDRESS TOKEN NODE INCARNATION`` prints its port."""

from __future__ import annotations

import sys
import threading

from gpuctl.cluster.clock import SystemClock
from gpuctl.cluster.membership.peers import Peers
from gpuctl.cluster.records.nodes import NodeRecord


def main(address: str, token: str, node: str, incarnation: str) -> None:
    peers = Peers(SystemClock(), token=token, silent_s=2.0, on_news=lambda: None)
    port = peers.start(address)
    peers.introduce(NodeRecord(node=node, incarnation=incarnation, beat=0, address=address, port=port))
    print(port, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
