"""The same as ``lockstep.py`` for torchrun: ranks that make steps together by an all-reduce of torch's.

It imports torch, as any script for torchrun does, and nothing beyond: of a training, an optimizer alone takes another
second to import, which is no rendezvous's.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

STEP_S = 0.02


def main(path: str) -> None:
    log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def mark(what: str, step: int) -> None:
        os.write(log, f"{what} {step} {time.monotonic():.6f} 0 {rank} {world} {os.getpid()}\n".encode())

    asked: list[int] = []
    if "GPUCTL_JOB" in os.environ:
        # An agent interrupts for a node that joins only who can be asked. torchrun kills, and would wait for a worker
        # that catches the signal in an all-reduce.
        signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
    mark("begin", 0)
    dist.init_process_group("gloo")
    mark("joined", 0)
    step = 0
    while True:
        stop = torch.tensor([float(bool(asked))])
        dist.all_reduce(stop)
        if stop:
            return
        step += 1
        mark("step", step)
        time.sleep(STEP_S)


if __name__ == "__main__":
    main(sys.argv[1])
