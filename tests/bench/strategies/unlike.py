"""One worker among unlike ones: outer steps while the kernel gives it a part of a core. Rank 0 prints JSON.

    python -m tests.bench.strategies.unlike STRATEGY OUTER_STEPS PART,PART,…

Needs root and the cpu controller of cgroups (version 1 or 2).
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from gpuctl.cluster.jobs.strategy import parse
from gpuctl.trainers import gloo_exit
from gpuctl.trainers.strategies.named import named
from gpuctl.trainers.strategies.outer.local_steps import LocalSteps
from tests.bench.strategies.rank import stepper, transformer

_ROOTS = (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup"))
_PERIOD_US = 20_000
LEARNING = 2
"""Outer steps that are not counted: the shares follow what was measured."""


@contextlib.contextmanager
def part_of_a_core(part: float) -> Iterator[None]:
    """This process has no more of a processor's time than that."""
    root = next(root for root in _ROOTS if (root / "cgroup.procs").exists())
    group = root / f"gpuctl-bench-{os.getpid()}"
    group.mkdir()
    quota = int(part * _PERIOD_US)
    try:
        if (group / "cpu.max").exists():
            (group / "cpu.max").write_text(f"{quota} {_PERIOD_US}")
        else:
            (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(quota))
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield
    finally:
        (root / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


def main(strategy: str, count: str, parts: str) -> None:
    torch.set_num_threads(1)
    gloo_exit.install()
    dist.init_process_group("gloo")
    model = transformer()
    outer = named(parse(strategy))
    assert isinstance(outer, LocalSteps)
    outer.attach(model)
    step = stepper(model, strategy)
    seconds: list[float] = []
    made: list[int] = []
    mine = 0
    with part_of_a_core(float(parts.split(",")[dist.get_rank()])):
        began = time.perf_counter()
        while len(seconds) < LEARNING + int(count):
            step()
            mine += 1
            if outer.after_step():
                seconds.append(time.perf_counter() - began)
                made.append(mine)
                mine, began = 0, time.perf_counter()
    everyone: list[list[int]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everyone, made)
    if dist.get_rank() == 0:
        print(json.dumps({"seconds": seconds[LEARNING:], "made": [of[LEARNING:] for of in everyone]}), flush=True)
    dist.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
