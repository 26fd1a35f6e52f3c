"""A checkpoint's strategy is another one than the run's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpuctl.cluster.errors import BadInput


def check_method(state: Mapping[str, Any], method: str) -> None:
    """Raises ``BadInput`` for the state of another one."""
    theirs = state.get("method")
    if theirs != method:
        raise BadInput(
            f"the checkpoint was made with the strategy {theirs}, and this run has {method}",
            f"go on with {theirs}, or use another checkpoint folder",
        )
