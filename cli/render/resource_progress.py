"""The progress that is seen while a cloud makes, changes and deletes resources."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from gpuctl.cli.render.terminal import say, styled

if TYPE_CHECKING:
    from gpuctl.stacks.engine.events import ResourceProgress


@contextmanager
def shown_progress() -> Iterator[Callable[[ResourceProgress], None]]:
    """A table that lives on a terminal; elsewhere a line for each resource that is done or has failed."""
    if not sys.stderr.isatty():
        yield lambda step: say(_line(step)) if step.state != "running" else None
        return
    from rich.console import Console
    from rich.live import Live

    table = _ProgressTable()
    # say() prints above the table: rich takes what goes to standard error while it is live.
    live = Live(console=Console(stderr=True, highlight=False), get_renderable=table.lines, refresh_per_second=4)

    def take(step: ResourceProgress) -> None:
        table.take(step)
        live.start()  # only now: before the first step, somebody may have to answer a question

    try:
        yield take
    finally:
        live.stop()


class _ProgressTable:
    """The resources that are being changed, and how many are done."""

    def __init__(self) -> None:
        self._running: dict[tuple[str, str], tuple[ResourceProgress, float]] = {}
        self._done: Counter[str] = Counter()
        self._failed: list[ResourceProgress] = []

    def take(self, step: ResourceProgress) -> None:
        place = (step.type, step.name)
        if step.state == "running":
            self._running[place] = (step, time.monotonic())
            return
        self._running.pop(place, None)
        if step.state == "done":
            self._done[_past(step.operation)] += 1
        else:
            self._failed.append(step)

    def lines(self) -> Any:
        from rich.text import Text

        now = time.monotonic()
        told = [_line(step) for step in list(self._failed)]
        told += [f"{_line(step)} … {now - since:.0f} s" for step, since in list(self._running.values())]
        if self._done:
            told.append(", ".join(f"{many} {verb}" for verb, many in sorted(self._done.items())))
        return Text.from_ansi("\n".join(told))


_PAST = {
    "create": "created",
    "create-replacement": "created",
    "update": "updated",
    "delete": "deleted",
    "delete-replaced": "deleted",
    "keep": "kept",
    "refresh": "read",
    "replace": "replaced",
}


def _past(verb: str) -> str:
    return _PAST.get(verb, verb)


def _line(step: ResourceProgress) -> str:
    kind = step.type.rpartition(":")[2]
    if step.state == "failed":
        return styled(f"{step.operation} {kind} {step.name} failed: {step.error}", "red", sys.stderr)
    verb = _past(step.operation) if step.state == "done" else step.operation
    return f"{verb} {kind} {step.name}"
