"""What the ranks of the deadline tests run: they are asked to stop while a save is on its way."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from gpuctl import Checkpointer
from gpuctl.cluster.worker_context import DEADLINE
from gpuctl.trainers.checkpoint.save.uploader import TransferLimits
from tests.waiting import until

_PARTS_S = 0.5
"""What one part of 16 MiB takes."""


def noticed_behind_two(left: float) -> None:
    """Step 1 is saved and committed, steps 2 and 3 are on their way, and step 4 is the last. ``left`` as below."""
    limits = TransferLimits(upload_bytes_per_s=(16 << 20) / _PARTS_S)
    checkpointer = Checkpointer(every=1, limits=limits, when_busy="wait")
    weights = torch.zeros(16 << 20)  # 64 MiB: four parts
    state = {"weights": torch.nn.ParameterList([weights])}
    checkpointer.restore(state)
    begun = time.monotonic()
    checkpointer.save(1, state)
    checkpointer.wait()
    took_s = time.monotonic() - begun
    for step in (2, 3, 4):
        with torch.no_grad():
            weights += 1
        if step == 4:
            Path(os.environ["GPUCTL_ROUND_DIR"], DEADLINE).write_text(f"{time.monotonic() + left * took_s:.3f}")
            os.kill(os.getpid(), signal.SIGTERM)
        checkpointer.step(step, state)


def noticed_in_the_first_save(left_s: float) -> None:
    """Nothing is committed yet, half of step 1 is in the bucket, and step 2 is the last."""
    checkpointer = Checkpointer(limits=TransferLimits(upload_bytes_per_s=(16 << 20) / _PARTS_S))
    weights = torch.zeros(16 << 20)  # 64 MiB: four parts
    state = {"weights": torch.nn.ParameterList([weights])}
    checkpointer.save(1, state)
    bucket = Path(os.environ["GPUCTL_BUCKET"].removeprefix("file://"))
    until(lambda: sum(path.stat().st_size for path in bucket.glob("**/1-r1.*/*")) > 32 << 20, "32 MiB of the save")
    Path(os.environ["GPUCTL_ROUND_DIR"], DEADLINE).write_text(f"{time.monotonic() + left_s:.3f}")
    os.kill(os.getpid(), signal.SIGTERM)
    with torch.no_grad():
        weights += 1
    checkpointer.step(2, state)


def noticed_unlike(lefts: Sequence[float]) -> None:
    """As below, on ranks whose machines have unlike times left."""
    own = Path(os.environ["GPUCTL_ROUND_DIR"], str(dist.get_rank()))
    own.mkdir()
    os.environ["GPUCTL_ROUND_DIR"] = str(own)
    noticed_in_a_save(lefts[dist.get_rank()])


def noticed_in_a_save(left: float) -> None:
    """Step 1 is saved and committed, step 2 is on its way, and step 3 is the last. ``left``: the time left before the
    end, as a multiple of what the first save took."""
    checkpointer = Checkpointer(every=2, limits=TransferLimits(upload_bytes_per_s=(16 << 20) / _PARTS_S))
    weights = torch.zeros(24 << 20)  # 96 MiB: three parts for each of two ranks
    state = {"weights": torch.nn.ParameterList([weights])}
    checkpointer.restore(state)
    begun = time.monotonic()
    checkpointer.save(1, state)
    checkpointer.wait()
    took_s = time.monotonic() - begun
    for rank in range(dist.get_world_size()):  # all are flagged, and rank 0 is the first: so all stop at step 3
        if rank == dist.get_rank():
            os.kill(os.getpid(), signal.SIGTERM)
            assert not checkpointer.should_stop(1)
        dist.barrier()
    for step in (2, 3):
        with torch.no_grad():
            weights += 1
        if step == 3:
            told = Path(os.environ["GPUCTL_ROUND_DIR"], DEADLINE)
            partial = told.with_suffix(f".{dist.get_rank()}")  # ranks on one machine tell it in one file, and read it
            partial.write_text(f"{time.monotonic() + left * took_s:.3f}")
            partial.replace(told)
        checkpointer.step(step, state)
        dist.barrier()
