"""One of several ranks that hold the same state, as DDP leaves it: save once, restore, compare.

torchrun --nproc-per-node 4 tests/bench/checkpoint/replica.py NAME SIZE ENDPOINT BUCKET PREFIX
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[3])

import torch.distributed as dist

from tests.bench.checkpoint import memory_guard
from tests.bench.checkpoint.contenders import MAKERS
from tests.bench.checkpoint.storage import Place


def main(name: str, size: str, endpoint: str, bucket: str, prefix: str) -> None:
    memory_guard.go_first()
    dist.init_process_group("gloo")
    contender = MAKERS[name](int(size), Place(endpoint, bucket, prefix))
    saved = contender.model.digest()
    contender.begin(1)
    contender.finish()
    contender.model.wipe()
    contender.restore()
    if contender.model.digest() != saved:
        raise ValueError("what came back is not what was saved")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
