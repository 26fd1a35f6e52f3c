"""Where all contenders meet: one server, one size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property

from tests.bench.checkpoint import memory_guard
from tests.bench.checkpoint.entrant import Entrant, entrant
from tests.bench.checkpoint.storage import Place, Server, serving
from tests.bench.settings import Settings

_SIZE = 1 << 30
_FAST_SIZE = 128 << 20
_PROCESS_BYTES = 400 << 20
"""Of a contender, besides its model and one copy of that."""
_SERVED = 4
"""Checkpoints that the server holds at once, at most: one is kept of each contender for its restore, or it puts one
large object together. Whoever saves on deletes what it saved before."""


def size_of(settings: Settings) -> int:
    """Bytes of the model."""
    return _FAST_SIZE if settings.fast else _SIZE


class Field:
    """The server starts when it is needed first, and ends with ``stack``."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    @cached_property
    def server(self) -> Server:
        return self._stack.enter_context(serving())

    @contextmanager
    def entrants(
        self, names: Sequence[str], settings: Settings, place: Place | None = None
    ) -> Iterator[dict[str, Entrant]]:
        """One process each, in places of their own unless ``place`` is given. Raises ``MemoryError``."""
        size = size_of(settings)
        memory_guard.check_memory(len(names) * (2 * size + _PROCESS_BYTES) + _SERVED * size)
        with ExitStack() as stack:
            found = {
                name: stack.enter_context(entrant(name, size, place or self.server.place(name), settings.root))
                for name in names
            }
            for one in found.values():
                one.answer()
            yield found
