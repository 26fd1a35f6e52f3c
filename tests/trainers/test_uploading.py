"""Work in threads of the saver."""

from __future__ import annotations

import pytest

from gpuctl.trainers.uploading import in_threads


class Odd(BaseException):
    """An error that is no ``Exception``."""


def test_results_come_in_the_order_of_their_items() -> None:
    assert in_threads(lambda number: -number, range(100), 4) == [-number for number in range(100)]


@pytest.mark.parametrize("kind", [ValueError, Odd])
def test_whatever_one_call_raises_is_raised_and_no_result_is_left_out(kind: type[BaseException]) -> None:
    def call(number: int) -> int:
        if number == 7:
            raise kind
        return number

    with pytest.raises(kind):
        in_threads(call, range(20), 4)
