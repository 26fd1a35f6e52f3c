"""Signals while Pulumi is at work: whoever interrupts it waits until it has ended."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from threading import Thread
from typing import TypeVar

T = TypeVar("T")

_SIGNALS_EVERY_S = 0.5


def to_the_end(verb: Callable[[], T], on_interrupt: Callable[[], None]) -> T:
    """Run ``verb`` in a thread, and wait for its end through every Ctrl-C: to leave before would leave behind
    operations that no state knows the outcome of.

    Args:
        verb: what is waited for.
        on_interrupt: is called for every interrupt, in this thread.

    Raises what ``verb`` has raised, and ``KeyboardInterrupt`` if it was interrupted and has ended well all the same.
    """
    interrupted: KeyboardInterrupt | None = None
    running: Future[T] = Future()

    def run() -> None:
        if running.set_running_or_notify_cancel():
            try:
                running.set_result(verb())
            except BaseException as error:  # noqa: BLE001 - raised below
                running.set_exception(error)

    thread = Thread(target=run, name="pulumi")
    begun = False
    while True:
        try:
            if not begun:
                begun = True
                thread.start()  # in which a signal may be heard too, when the thread is at work already
            # Python runs signal handlers in this thread, which a signal wakes only if the system delivered it here
            # and not to one of Pulumi's threads.
            if wait([running], _SIGNALS_EVERY_S).done:
                break
        except KeyboardInterrupt as error:
            if running.cancel():
                raise
            interrupted = error
            on_interrupt()
    if interrupted is not None and running.exception() is None:
        raise interrupted
    return running.result()
