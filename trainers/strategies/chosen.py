"""What ``gpuctl train --strategy`` named, as a worker finds it. Without torch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from gpuctl.cluster.errors import BadInput
from gpuctl.cluster.jobs.strategy import StrategyChoice, parse
from gpuctl.cluster.worker_context import STRATEGY, STRATEGY_READ


def chosen(env: Mapping[str, str] = os.environ) -> StrategyChoice | None:
    """The strategy that ``GPUCTL_STRATEGY`` names; ``None`` if there is no such variable, or it is empty.

    In a job it also leaves a mark for the agent, which otherwise tells the user that the strategy had no effect: call
    it where the strategy is then used. Raises ``BadInput`` for what ``parse`` refuses.
    """
    text = env.get(STRATEGY, "")
    if not text:
        return None
    try:
        choice = parse(text)
    except BadInput as error:
        raise BadInput(f"{STRATEGY}={text} is invalid: {error.message}", error.hint) from error
    if folder := env.get("GPUCTL_ROUND_DIR"):
        with contextlib.suppress(OSError):  # a mark that is missing costs a line in the log, and no training
            (Path(folder) / STRATEGY_READ).touch()
    return choice
