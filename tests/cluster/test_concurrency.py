"""Work in several threads."""

from __future__ import annotations

import _thread
import signal
import threading
import time
import weakref
from collections.abc import Iterator

import pytest

from gpuctl.cluster.concurrency import READS_AT_ONCE, collect, for_each, read_each
from gpuctl.cluster.errors import Damaged


class Odd(BaseException):
    """An error that is no ``Exception``."""


class Block:
    """Stands for much memory."""


def test_results_come_in_the_order_of_their_items() -> None:
    assert collect(lambda number: -number, range(100), 4) == [-number for number in range(100)]
    assert collect(lambda number: -number, [], 0) == []


@pytest.mark.parametrize("kind", [ValueError, Odd])
def test_the_error_of_one_call_is_raised(kind: type[BaseException]) -> None:
    def call(number: int) -> int:
        if number == 7:
            raise kind
        return number

    with pytest.raises(kind):
        collect(call, range(20), 4)


def test_after_an_error_no_further_item_is_taken() -> None:
    taken = []

    def numbers() -> Iterator[int]:
        for number in range(1000):
            taken.append(number)
            yield number

    def fail(number: int) -> None:
        if number == 3:
            raise ValueError(number)

    with pytest.raises(ValueError, match="3"):
        for_each(fail, numbers(), 1)
    assert taken == [0, 1, 2, 3]


def test_an_item_is_let_go_of_before_the_next_is_taken() -> None:
    alive: list[weakref.ref[Block]] = []
    most = 0

    def blocks() -> Iterator[Block]:
        nonlocal most
        for _ in range(10):
            most = max(most, sum(one() is not None for one in alive))
            block = Block()
            alive.append(weakref.ref(block))
            yield block
            del block

    for_each(lambda _: None, blocks(), 1)
    assert most <= 1, "the generator itself holds the last one until it goes on"


def test_ctrl_c_leaves_calls_behind_that_do_not_end() -> None:
    main = threading.main_thread().ident
    assert main is not None
    release = threading.Event()

    def stuck(_: int) -> None:
        signal.pthread_kill(main, signal.SIGINT)
        release.wait()

    try:
        with pytest.raises(KeyboardInterrupt):
            for_each(stuck, [0], 1, leave_after_s=0.01)
    finally:
        release.set()


# -- read_each -------------------------------------------------------------------------------------------------------


def test_no_more_than_so_many_blocks_are_on_their_way_and_all_get_done() -> None:
    now, most, done = 0, 0, 0
    lock = threading.Lock()
    full = threading.Event()

    def do(_: int) -> None:
        nonlocal now, most, done
        with lock:
            now, most = now + 1, max(most, now + 1)
            if now == READS_AT_ONCE:
                full.set()
        assert full.wait(30), "they do not run side by side"
        with lock:
            now, done = now - 1, done + 1

    read_each(range(100), do, lambda *_: None)
    assert (most, done) == (READS_AT_ONCE, 100)


def test_the_first_error_ends_it() -> None:
    begun: list[int] = []

    def do(item: int) -> None:
        begun.append(item)
        if item == 5:
            raise Damaged("five")
        time.sleep(0.001)

    with pytest.raises(Damaged, match="five"):
        read_each(range(1_000_000), do, lambda *_: None)
    assert len(begun) < 1000


@pytest.mark.timing
def test_ctrl_c_before_all_have_begun_is_ctrl_c() -> None:
    def do(_: int) -> None:
        _thread.interrupt_main()
        time.sleep(0.001)

    for _ in range(20):
        with pytest.raises(KeyboardInterrupt):
            read_each(range(1_000_000), do, lambda *_: None)
