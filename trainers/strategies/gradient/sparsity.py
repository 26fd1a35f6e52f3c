"""A ratio that comes down over the first steps."""

from __future__ import annotations

FIRST = 0.25
"""Of the values, in the first step of a warm-up: the sparsity of 75 % that DGC begins with (arXiv:1712.01887, 3.3)."""


def ratio_at(step: int, ratio: float, warmup_steps: int) -> float:
    """The part of the values to send in ``step``, the first one being 0: exponentially from ``FIRST`` to ``ratio``."""
    if step >= warmup_steps or ratio >= FIRST:
        return ratio
    return FIRST * float((ratio / FIRST) ** (step / warmup_steps))
