"""Work in several threads."""

from __future__ import annotations

import os

import pytest

from gpuctl.trainers.threads import in_threads, spare_cores


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


def test_all_workers_of_a_node_together_have_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = len(os.sched_getaffinity(0))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert spare_cores(1) == cores
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(cores))
    assert spare_cores(1) == 1
    assert spare_cores(cores) == 1, "never none"
