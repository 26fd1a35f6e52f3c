"""torch's launcher for worker processes, which also sees the end of those that leave without a word.

torch waits for a value from each worker, and so for ever for one that ended by ``os._exit(0)``; and it takes a
worker that executed another program (``os.exec*``) for one that has ended, and then waits for nothing but that.
"""

from __future__ import annotations

import signal
from multiprocessing.connection import wait
from typing import Any

from torch.distributed.elastic import multiprocessing
from torch.distributed.elastic.multiprocessing.api import MultiprocessContext

_SHUTDOWN_S = 10
"""From a worker's SIGTERM to its SIGKILL, when another one has failed. torch has 30, and up to 2.11 no setting."""


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

    def _close(self, death_sig: signal.Signals, timeout: int = _SHUTDOWN_S) -> None:
        super()._close(death_sig, min(timeout, _SHUTDOWN_S))


def install() -> None:
    """Make ``elastic_launch`` start ``Workers``."""
    multiprocessing.MultiprocessContext = Workers  # type: ignore[misc]
