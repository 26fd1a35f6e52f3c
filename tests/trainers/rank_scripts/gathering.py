"""What the ranks of the gathering tests run."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path

import torch.distributed as dist

from gpuctl.trainers.checkpoint.save.store_gather import PeersGone, StoreGather
from gpuctl.trainers.world import job_store
from tests.waiting import until


def meet_after_the_end(folder: str, later_s: float, comes: bool) -> None:
    """Rank 0's script ends at once. When rank 0, by its clock, has waited for ``later_s``, rank 1 hands in its report,
    if it ``comes`` at all. What rank 0 makes of that is in the file ``told``."""
    waits, told = Path(folder, "waits"), Path(folder, "told")
    if dist.get_rank() == 1:
        until(waits.exists, f"{waits}")
        if comes:
            StoreGather("test").exchange(0, b"of rank 1")
        until(told.exists, f"{told}")
        return
    looks = itertools.count()

    def now() -> float:
        """The second look is ``later_s`` after the first."""
        if next(looks) < 2:
            return 1.0
        waits.touch()
        return 1.0 + later_s

    def meet() -> None:
        try:
            text = f"{len(StoreGather('test', now).exchange(0, b'of rank 0') or [])} reports"
        except PeersGone as error:
            text = error.message
        told.with_suffix(".partial").write_text(text)
        told.with_suffix(".partial").rename(told)

    threading.Thread(target=meet).start()


def exchange(times: int) -> int:
    """How many keys are in the job's store after so many saves."""
    gathering = StoreGather("test")
    for number in range(times):
        if gathering.exchange(number, b"report") is not None:
            gathering.answer(number, b"outcome")
        else:
            gathering.outcome(number)
    dist.barrier()
    return job_store("").num_keys()
