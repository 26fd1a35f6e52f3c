"""What the pods of the bench run: ranks that make steps together, over plain sockets, and end when one of them is gone.

``lockstep.py LOG`` reads what any launcher gives (MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE), and writes a line a step
as ``tests/bench/steps.py`` does. It imports no torch: what is measured is how soon a round begins, not an import.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time

STEP_S = 0.02
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
WHERE = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
ROUND = os.environ.get("MINGLE_ROUND", "0")


def main(path: str) -> None:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def mark(what: str, step: int) -> None:
        os.write(log, f"{what} {step} {time.monotonic():.6f} {ROUND} {RANK} {WORLD} {os.getpid()}\n".encode())

    mark("begin", 0)
    lines = served() if RANK == 0 else [called()]
    mark("joined", 0)
    step = 0
    while True:
        for line in lines:
            if RANK == 0:
                hear(line)
        for line in lines:
            line.sendall(b".")
        for line in lines:
            if RANK != 0:
                hear(line)
        step += 1
        mark("step", step)
        time.sleep(STEP_S)


def hear(line: socket.socket) -> None:
    if not line.recv(1):
        sys.exit(1)  # as a collective fails whose peer is gone


def served() -> list[socket.socket]:
    with socket.create_server(WHERE, backlog=WORLD) as server:
        return [server.accept()[0] for _ in range(WORLD - 1)]


def called() -> socket.socket:
    while True:
        try:
            return socket.create_connection(WHERE, timeout=None)
        except OSError:
            time.sleep(0.01)


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except OSError:
        sys.exit(1)
