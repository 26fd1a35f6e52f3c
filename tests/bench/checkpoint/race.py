"""Runs of several contenders in turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from tests.bench.checkpoint.entrant import Entrant

T = TypeVar("T")


def in_turn(entrants: Mapping[str, Entrant], runs: int, measure: Callable[[Entrant], T]) -> dict[str, list[T]]:
    """``measure`` of each, again and again, so that what else the machine does meets all of them. The first time does
    not count: then memory is touched, connections are made and code is loaded, on all sides."""
    found: dict[str, list[T]] = {name: [] for name in entrants}
    for run in range(runs + 1):
        for name, entrant in entrants.items():
            result = measure(entrant)
            if run > 0:
                found[name].append(result)
    return found
