"""torch's launcher for worker processes, which also sees the end of those that leave without a word.

torch 2.13 waits for a value from each worker, and so for ever for one that ended by ``os._exit(0)``; and it takes a
worker that executed another program (``os.exec*``) for one that has ended, and then waits for nothing but that.
"""

from __future__ import annotations

from multiprocessing.connection import wait
from typing import Any

from torch.distributed.elastic import multiprocessing
from torch.distributed.elastic.multiprocessing.api import MultiprocessContext


class Workers(MultiprocessContext):
    """The worker processes of a node. A worker is done when its process has ended with exit code 0, whatever it has
    told."""

    def _poll(self) -> Any:
        assert self._pc is not None
        for local_rank, process in enumerate(self._pc.processes):
            if process.exitcode == 0 and self._ret_vals[local_rank].empty():
                self._return_values.setdefault(local_rank, None)
        # The sentinel is a pipe that a program which is executed closes.
        sentinels = self._pc.sentinels
        alive = [one for one in wait(list(sentinels), 0) if self._pc.processes[sentinels[one]].exitcode is None]
        kept = {one: sentinels.pop(one) for one in alive}
        try:
            return super()._poll()
        finally:
            sentinels.update(kept)


def install() -> None:
    """Make ``elastic_launch`` start ``Workers``."""
    multiprocessing.MultiprocessContext = Workers  # type: ignore[misc]
