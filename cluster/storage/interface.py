"""What a store of objects can do, whichever it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    pass


@dataclass(frozen=True, slots=True)
class Entry:
    """One listed object."""

    key: str
    size: int
    tag: str
    """Changes when the content changes."""
    modified: float
    """Seconds since the epoch, by the store's clock."""


class Store(Protocol):
    """Object storage as agreement needs it. ``create`` must let exactly one of many writers of a key win.

    Every verb raises ``StoreUnavailable`` when the answer did not come (a write may or may not have landed), and
    ``StoreError`` when the store refuses.
    """

    def get(self, key: str) -> bytes | None: ...

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """``get`` of each, in order; at the same time where that is quicker."""
        ...

    def put(self, key: str, data: bytes) -> None: ...

    def create(self, key: str, data: bytes) -> bool:
        """Write ``key`` if nobody has; ``False`` if it was there. After a lost answer, a retry inside the client may
        report ``False`` for a put of ours that landed: who must know reads the key back (``ledger`` does)."""
        ...

    def list(self, prefix: str, after: str | None = None) -> list[Entry]:
        """The objects under folder ``prefix`` in key order, those past key ``after`` if given."""
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Remove what is there; a missing key is not an error."""
        ...


class PartStore(Store, Protocol):
    """Object storage as the parts of checkpoints need it."""

    def get_range(self, key: str, start: int, end: int) -> memoryview:
        """Bytes ``[start, end)`` of an object that exists; ``FileNotFoundError`` if it does not."""
        ...

    def stream(self, key: str, start: int, end: int) -> Iterator[memoryview]:
        """Bytes ``[start, end)`` of an object, fewer if it ends before, in pieces of any size. Each is good until the
        next one is asked for. Asking raises ``FileNotFoundError`` if there is no such object."""
        ...

    def put(self, key: str, data: bytes | memoryview) -> None: ...
