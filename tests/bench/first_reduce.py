"""A worker that notes when its first all-reduce is done (seconds of the machine's monotonic clock)."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist


def main(out: str) -> None:
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    (Path(out) / str(dist.get_rank())).write_text(str(time.monotonic()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
