"""A worker of the bench: imports what it is told to, and notes when its first step of each round is done."""

from __future__ import annotations

import importlib
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist


def main(out: str, *modules: str) -> None:
    for name in modules:
        importlib.import_module(name)
    dist.init_process_group("gloo")
    for step in range(1_000_000):
        dist.all_reduce(torch.ones(1000))
        if step == 0:
            name = f"{os.environ['GPUCTL_ROUND']}-{dist.get_world_size()}-{dist.get_rank()}"
            (Path(out) / name).write_text(str(time.time()))
        time.sleep(0.02)


if __name__ == "__main__":
    main(*sys.argv[1:])
