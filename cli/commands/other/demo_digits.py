"""The script of the demo's jobs: ``digits.py`` as it is, but it stands still where the demo wants to show something.

So the demo shows the same on a machine of any speed. The demo sends this file to its nodes; nothing here imports it.
A file in the folder ``DEMO_HOLDS``, named for a step, stops the workers once they have done that many steps, until the
demo removes it, or the agent asks them to leave: that takes a step or two (see ``trainers.stop_signal``).
"""

from __future__ import annotations

import os
import time
from typing import Any

import digits  # type: ignore[import-not-found]  # lies beside this file in the job's folder
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gpuctl.cluster.worker_context import DEADLINE, WorkerContext

_LOOK_S = 0.02


def wait_at_gate(optimizer: Any, *_: Any) -> None:
    """Wait before an optimizer step until the demo lets it go."""
    done = max((int(state["step"]) for state in optimizer.state.values()), default=0)
    while _is_held(done) and not _is_to_leave():
        time.sleep(_LOOK_S)


def _is_held(done: int) -> bool:
    holds = os.environ["DEMO_HOLDS"]
    return os.path.isdir(holds) and any(int(step) <= done for step in os.listdir(holds))  # noqa: PTH112, PTH208


def _is_to_leave() -> bool:
    context = WorkerContext.from_env()
    return context is None or (context.round_dir / DEADLINE).exists()


if __name__ == "__main__":
    register_optimizer_step_pre_hook(wait_at_gate)
    digits.main()
