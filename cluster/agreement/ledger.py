"""The one primitive for agreement: a document with versions, where version n + 1 has exactly one writer.

A version is an object of its own, written by a create-only put, so the store decides who wins and no lock, no server
and no clock is needed. Three traps, and what is done about them:

- *The answer got lost.* A timeout after the put, or a retry inside the client that meets our own object, looks like a
  defeat. Each version carries its writer's mark; after anything but a clean success the version is read back.
- *A sleeper wakes.* Old versions are pruned, so a writer that slept may create a version that was long decided. A
  winner therefore looks once for a higher version, and has lost if there is one.
- *A store that ignores conditions.* ``bucket.probe`` refuses it before the first use.

What follows for a writer: ``True`` is a decision and no other writer gets it for that version. Anything else is none:
the value may stand in the ledger all the same, because another writer built on it before we looked, or because a put
that timed out lands later. So read before doing it over, and undo nothing unread.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count
from typing import Generic, TypeVar

import msgspec

from gpuctl.cluster.errors import StoreError, StoreUnavailable
from gpuctl.cluster.records.codec import decode
from gpuctl.cluster.retry import ATTEMPTS
from gpuctl.cluster.storage.interface import Store

T = TypeVar("T")

_DIGITS = 12


@dataclass(frozen=True, slots=True)
class Version(Generic[T]):
    """A ledger's value and its version; version 0 with no value is the empty ledger."""

    value: T | None
    number: int


class Ledger(Generic[T]):
    """A list of versions of one record of ``kind``, under the folder ``prefix``, which holds nothing else.

    ``keep`` is how many versions stay readable, the newest included; ``None``: all. Everybody who opens a ledger gives
    the same. It must outlast a reader's pause between two requests, and a listing, which on a local folder is no
    snapshot: a reader that falls behind by ``keep`` versions within one ``read`` may be shown a version that lost.

    One object may be used by one thread at a time.
    """

    def __init__(self, store: Store, prefix: str, kind: type[T], *, keep: int | None = 64) -> None:
        if keep is not None and keep < 2:
            raise ValueError(f"keep={keep}: a ledger must keep at least 2 versions, or readers find none")
        self._store = store
        self._prefix = prefix
        self._kind = kind
        self._keep = keep

    def read(self) -> Version[T]:
        """The newest version: one LIST and one GET."""
        while versions := self._versions(after=0):
            newest = self._get(versions[-1])
            if newest is not None:
                return newest
            # pruned between the two requests: a newer one exists
        return Version(None, 0)

    def newer(self, than: int) -> Version[T] | None:
        """The newest version above ``than`` if there is one: a GET while nothing changed, else what ``read`` costs too.

        A watcher that slept past a pruning sees nothing here, so it must call ``read`` now and then.
        """
        following = self._get(than + 1)
        if following is None:
            return None
        newest = self.read()
        return newest if newest.number > than else following

    def commit(self, value: T, based_on: int) -> bool:
        """Write version ``based_on`` + 1; ``True`` if it is ours and nobody has built on it yet.

        Raises ``StoreUnavailable`` if the store does not say who won; calling again with the same value is then safe
        only if a second entry does no harm (a read shows what happened).
        """
        number = based_on + 1
        mark = uuid.uuid4().hex
        entry = LedgerEntry(mark=mark, value=msgspec.Raw(msgspec.json.encode(value)))
        try:
            writer = mark if self._store.create(self._key(number), msgspec.json.encode(entry)) else self._writer(number)
        except StoreUnavailable:
            writer = self._writer(number)
            if writer is None:
                raise  # not there, or not there yet
        if writer != mark:
            return False
        if self._keep is not None and (higher := self._versions(after=number)):
            if number <= higher[-1] - self._keep:
                self._drop([number])
            return False
        self._prune(number)
        return True

    def update(self, change: Callable[[T | None], T | None], busy: str) -> tuple[T | None, T | None]:
        """Commit what ``change`` makes of the newest value, anew for each that somebody else commits meanwhile.

        Args:
            change: Returns the value to commit, or None where the one it is given may stay.
            busy: What to tell a person when others were quicker each time.

        Returns the value that was the newest, and what was committed after it: None if it stays. Raises
        ``StoreUnavailable``.
        """
        for _ in range(ATTEMPTS):
            version = self.read()
            wanted = change(version.value)
            if wanted is None or self.commit(wanted, version.number):
                return version.value, wanted
        raise StoreUnavailable(busy, "try again")

    def history(self) -> list[Version[T]]:
        """Every version that is still kept, oldest first."""
        return self.since(0)

    def since(self, number: int) -> list[Version[T]]:
        """The versions above ``number``, oldest first and without a hole: what follows one is seen the next time.

        (The listing of a local folder may lack a version that was written meanwhile, and yet have the one after it.)
        """
        found = self._versions(after=number)
        if not found:
            return []
        first = number + 1
        if self._keep is not None:
            # What is older was pruned, or should have been, or is what a sleeper wrote.
            found = [n for n in found if n > found[-1] - self._keep]
            first = found[0]
        run = [n for n, expected in zip(found, count(first), strict=False) if n == expected]
        return [version for n in run if (version := self._get(n)) is not None]

    def _get(self, number: int) -> Version[T] | None:
        entry = self._entry(number)
        return None if entry is None else Version(decode(entry.value, self._kind, self._key(number)), number)

    def _writer(self, number: int) -> str | None:
        entry = self._entry(number)
        return None if entry is None else entry.mark

    def _entry(self, number: int) -> LedgerEntry | None:
        key = self._key(number)
        data = self._store.get(key)
        return None if data is None else decode(data, LedgerEntry, key)

    def _versions(self, after: int) -> list[int]:
        entries = self._store.list(self._prefix, after=self._key(after) if after else None)
        names = [(e.key, e.key.rsplit("/", 1)[-1]) for e in entries]
        return [int(name) for key, name in names if name.isdecimal() and key == self._key(int(name))]

    def _prune(self, newest: int) -> None:
        if self._keep is None or newest <= self._keep:
            return
        # One beyond the horizon each time, and now and then whatever an interrupted pruning left.
        if newest % self._keep == 0:
            with contextlib.suppress(StoreUnavailable, StoreError):
                self._drop(n for n in self._versions(after=0) if n <= newest - self._keep)
        else:
            self._drop([newest - self._keep])

    def _drop(self, numbers: Iterable[int]) -> None:
        """Housekeeping: that it failed says nothing about a commit, and the next sweep makes up for it."""
        with contextlib.suppress(StoreUnavailable, StoreError):
            self._store.delete([self._key(n) for n in numbers])

    def _key(self, number: int) -> str:
        return f"{self._prefix}/{number:0{_DIGITS}d}"


class LedgerEntry(msgspec.Struct, frozen=True):
    """A version as it lies in the store."""

    mark: str
    """Drawn by its writer for this one put, to know it again."""
    value: msgspec.Raw
