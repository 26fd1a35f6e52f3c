"""The one primitive for agreement: a document with versions, where version n + 1 has exactly one writer.

A version is an object of its own, written by a create-only put, so the store decides who wins and no lock, no server
and no clock is needed. Three traps, and what is done about them:

- *The answer got lost.* A timeout after the put, or a retry inside the client that meets our own object, looks like a
  defeat. Each version carries its writer's mark; after anything but a clean success the version is read back.
- *A sleeper wakes.* Old versions are pruned, so a writer that slept may create a version that was long decided. A
  winner therefore looks once for a higher version, and has lost if there is one.
- *A store that ignores conditions.* ``bucket.probe`` refuses it before the first use.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from gpuctl.cluster.bucket import Store
from gpuctl.cluster.errors import StoreUnavailable
from gpuctl.cluster.records import decode

T = TypeVar("T")

_DIGITS = 12


@dataclass(frozen=True, slots=True)
class Version(Generic[T]):
    """A value and the version that holds it; version 0 with no value is the empty ledger."""

    value: T | None
    number: int


class Ledger(Generic[T]):
    """A ledger of ``kind`` under the folder ``prefix``. ``keep`` is how many old versions stay readable; ``None``: all.

    One object may be used by one thread at a time.
    """

    def __init__(self, store: Store, prefix: str, kind: type[T], *, keep: int | None = 64) -> None:
        self._store = store
        self._prefix = prefix
        self._kind = kind
        self._keep = keep

    def read(self) -> Version[T]:
        """The newest version: one LIST and one GET."""
        while versions := self._versions(after=0):
            value = self._get(versions[-1])
            if value is not None:
                return Version(value, versions[-1])
            # pruned between the two requests: a newer one exists
        return Version(None, 0)

    def newer(self, than: int) -> Version[T] | None:
        """The newest version above ``than`` if there is one: a GET while nothing changed.

        A watcher that slept past a pruning sees nothing here, so it must call ``read`` now and then.
        """
        value = self._get(than + 1)
        if value is None:
            return None
        newest = self.read()
        return newest if newest.number > than else Version(value, than + 1)

    def commit(self, value: T, based_on: int) -> bool:
        """Write version ``based_on`` + 1; ``True`` if it is ours and the newest.

        Raises ``StoreUnavailable`` if the store does not say who won; calling again with the same value is then safe
        only if a second entry does no harm (a read shows what happened).
        """
        number = based_on + 1
        key = self._key(number)
        mark = uuid.uuid4().hex
        data = msgspec.json.encode({"mark": mark, "value": value})
        try:
            won = self._store.create(key, data) or self._is_mine(key, mark)
        except StoreUnavailable:
            won = self._is_mine(key, mark)
            if not won and self._store.get(key) is None:
                raise
        if not won:
            return False
        if self._keep is not None and self._versions(after=number):
            return False
        self._prune(number)
        return True

    def history(self) -> list[Version[T]]:
        """Every version that is still there, oldest first."""
        return self.since(0)

    def since(self, number: int) -> list[Version[T]]:
        """Every version above ``number``, oldest first."""
        found = [Version(self._get(n), n) for n in self._versions(after=number)]
        return [version for version in found if version.value is not None]

    def _is_mine(self, key: str, mark: str) -> bool:
        data = self._store.get(key)
        return data is not None and bool(json.loads(data).get("mark") == mark)

    def _get(self, number: int) -> T | None:
        key = self._key(number)
        data = self._store.get(key)
        if data is None:
            return None
        envelope: _Envelope[T] = decode(data, _Envelope[self._kind], key)  # type: ignore[name-defined]
        return envelope.value

    def _versions(self, after: int) -> list[int]:
        entries = self._store.list(self._prefix, after=self._key(after) if after else None)
        return [int(name) for e in entries if (name := e.key.rsplit("/", 1)[-1]).isdigit()]

    def _prune(self, newest: int) -> None:
        if self._keep is None or newest <= self._keep:
            return
        # One beyond the horizon each time, and now and then whatever an interrupted pruning left.
        if newest % self._keep == 0:
            self._store.delete([self._key(n) for n in self._versions(after=0) if n <= newest - self._keep])
        else:
            self._store.delete([self._key(newest - self._keep)])

    def _key(self, number: int) -> str:
        return f"{self._prefix}/{number:0{_DIGITS}d}"


class _Envelope(msgspec.Struct, Generic[T]):
    mark: str
    value: T
