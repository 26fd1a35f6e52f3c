from __future__ import annotations

import pytest

from gpuctl.trainers.strategies.gradient.sparsity import ratio_at


def test_without_a_warm_up_the_ratio_is_what_it_is() -> None:
    assert ratio_at(0, 0.01, 0) == 0.01


def test_it_comes_down_from_a_quarter_by_the_same_factor_in_each_step() -> None:
    """DGC's own: 25 %, 6.25 %, 1.5625 %, 0.4 %, 0.1 % (3.3 of the paper)."""
    found = [ratio_at(step, 0.25 / 4**4, 4) for step in range(6)]
    assert found == pytest.approx([0.25, 0.25 / 4, 0.25 / 16, 0.25 / 64, 0.25 / 256, 0.25 / 256])


def test_more_than_a_quarter_needs_none() -> None:
    assert ratio_at(0, 0.5, 100) == 0.5
