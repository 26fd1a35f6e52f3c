"""What a plan leaves behind in its process."""

from __future__ import annotations

import asyncio
import gc

import pytest

from gpuctl.stacks.plan.planner import plan
from tests.fakes.requests import asked


@pytest.mark.slow
def test_a_plan_leaves_no_event_loop_open() -> None:
    """Python closes one that it collects, and may complain of it on the user's terminal."""
    earlier = _open()
    gc.disable()
    try:
        plan(asked("aws"))
        assert _open() <= earlier
    finally:
        gc.enable()


def _open() -> set[asyncio.BaseEventLoop]:
    loops = [one for one in gc.get_objects() if issubclass(type(one), asyncio.BaseEventLoop)]
    return {loop for loop in loops if not loop.is_closed()}
