from __future__ import annotations

import pytest

from gpuctl.trainers.strategies import speeds


@pytest.mark.parametrize(
    ("total", "fast", "expected"),
    [
        (100, [1.0, 1.0, 2.0], [25, 25, 50]),
        (10, [1.0, 1.0, 1.0], [4, 3, 3]),
        (10, [1e-9, 1.0], [1, 9]),  # nobody is left out
        (2, [1.0, 1.0, 1.0], [1, 1, 0]),
        (7, [0.0, 1.0], [4, 3]),  # nothing is known of one
        (6, [3.0], [6]),
    ],
)
def test_shares_add_up_and_follow_the_speeds(total: int, fast: list[float], expected: list[int]) -> None:
    found = speeds.shares(total, fast)
    assert found == expected and sum(found) == total


def test_any_shares_add_up() -> None:
    for total in range(1, 40):
        for other in (0.1, 0.33, 1.0, 7.7):
            found = speeds.shares(total, [1.0, other, 2.0])
            assert sum(found) == total and (total < 3 or min(found) >= 1)


def test_a_speed_follows_what_is_measured() -> None:
    first = speeds.updated([], [10, 5], [1.0, 1.0])
    assert first == [10.0, 5.0]
    assert speeds.updated(first, [10, 0], [2.0, 0.0]) == [7.5, 5.0]
