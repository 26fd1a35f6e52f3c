"""The ledger against a model: several writers, interleaved at each call of the store, with faults in any of them.

``_World`` is the store and the truth: what first landed as version n *is* version n. Each writer runs in a thread that
does nothing but wait for its turn; a turn is one call of the store. So an example replays exactly, and shrinks.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuctl.cluster.agreement.ledger import Ledger, LedgerEntry, Version
from gpuctl.cluster.errors import StoreUnavailable
from gpuctl.cluster.records.codec import decode
from gpuctl.cluster.storage.interface import Entry

Value = tuple[str, ...]
"""Its own name last, after those of the versions it was built on."""

_TROUBLES = ("lost", "unheard", "late", "retried")
"""``lost``: never arrived. ``unheard``: done, the answer lost. ``late``: the put lands at some later time, or never.
``retried``: done, the answer lost, and the client asks again when its next turn comes."""


class _World:
    """The objects, and what they have ever been."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.decided: dict[int, Value] = {}
        self.on_their_way: list[tuple[str, bytes]] = []

    @property
    def top(self) -> int:
        return max(self.decided, default=0)

    def create(self, key: str, data: bytes) -> bool:
        if key in self.objects:
            return False
        self.objects[key] = data
        entry = decode(data, LedgerEntry, key)
        self.decided.setdefault(int(key.rsplit("/", 1)[-1]), decode(entry.value, Value, key))
        return True

    def list(self, prefix: str, after: str | None) -> list[Entry]:
        return [Entry(k, 1, "", 0.0) for k in sorted(self.objects) if k.startswith(f"{prefix}/") and k > (after or "")]

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.objects.pop(key, None)


class _Over(BaseException):
    """The example has ended: unwind."""


class _Writer(threading.Thread):
    """One writer: its ledger, what it knows, and the store as it sees it."""

    def __init__(
        self, name: str, world: _World, keep: int | None, deeds: Sequence[str], wins: dict[int, Value]
    ) -> None:
        super().__init__(name=name, daemon=True)
        self.world = world
        self.keep = keep
        self.deeds = deeds
        self.wins = wins
        self.ledger: Ledger[Value] = Ledger(self, "ledger", Value, keep=keep)
        self.known: Version[Value] = Version(None, 0)
        self.done = False
        self.failure: BaseException | None = None
        self._trouble: str | None = None
        self._troubled = False
        self._turn = threading.Semaphore(0)
        self._pause = threading.Semaphore(0)

    # -- the scheduler's side

    def step(self, trouble: str | None) -> None:
        """Let it do its next call, with this trouble, and all it does by itself until the one after."""
        self._trouble = trouble
        self._turn.release()
        self._pause.acquire()
        if self.failure is not None:
            raise self.failure

    def end(self) -> None:
        while not self.done:
            self._trouble = "end"
            self._turn.release()
            self._pause.acquire()
        self.join()

    # -- the thread's side

    def run(self) -> None:
        self._turn.acquire()
        try:
            for number, deed in enumerate(self.deeds):
                self._do(deed, f"{self.name}{number}")
        except _Over:
            pass
        except BaseException as failure:  # noqa: BLE001 - it is raised where the test waits
            self.failure = failure
        finally:
            self.done = True
            self._pause.release()

    def _do(self, deed: str, name: str) -> None:
        self._troubled = False
        try:
            if deed == "read":
                self._read()
            elif deed == "newer":
                self._newer()
            else:
                self._commit(name)
        except StoreUnavailable:
            assert self._troubled, "nothing happened to it, and yet it found the store unavailable"

    def _read(self) -> None:
        top_before = self.world.top
        self._see(self.ledger.read(), at_least=top_before)

    def _newer(self) -> None:
        than, top_before = self.known.number, self.world.top
        found = self.ledger.newer(than)
        if found is not None:
            self._see(found, at_least=max(than + 1, top_before))
        else:
            assert than >= top_before or self._is_old(than + 1), "it missed a version that was there to see"

    def _see(self, found: Version[Value], *, at_least: int) -> None:
        assert found.number >= at_least, "it saw less than was there when it began to look"
        if found.number and not self._is_old(found.number):
            assert found.value == self.world.decided[found.number], "it saw a value that was never decided"
        self.known = found

    def _commit(self, name: str) -> None:
        number = self.known.number + 1
        value = (*(self.known.value or ()), name)
        if self.ledger.commit(value, self.known.number):
            assert number not in self.wins, f"version {number} was won twice"
            assert self.world.decided[number] == value, "it won a version that is another's"
            self.wins[number] = value
            self.known = Version(value, number)
        elif self.world.decided.get(number) == value:
            assert self.keep is not None, "where nothing is pruned, a defeat is a defeat"
            assert self.world.top > number, "it was told that it lost, and its value is the newest"
        else:
            assert number in self.world.decided, "it was told that it lost, and nobody has won"

    def _is_old(self, number: int) -> bool:
        """What a reader sees of such a version is not promised: it took its time while ``keep`` others were written."""
        return self.keep is not None and number <= self.world.top - self.keep

    # -- the store, as this writer sees it

    def _call(self, act: Any, *, late: tuple[str, bytes] | None = None) -> Any:
        self._pause.release()
        self._turn.acquire()
        trouble = self._trouble
        if trouble == "end":
            raise _Over
        self._troubled = self._troubled or trouble is not None
        if trouble == "late" and late is not None:
            self.world.on_their_way.append(late)
        if trouble in ("lost", "late"):
            raise StoreUnavailable("the call never arrived")
        answer = act()
        if trouble == "unheard":
            raise StoreUnavailable("the answer got lost")
        if trouble == "retried":
            return self._call(act, late=late)
        return answer

    def get(self, key: str) -> bytes | None:
        answer: bytes | None = self._call(lambda: self.world.objects.get(key))
        return answer

    def create(self, key: str, data: bytes) -> bool:
        answer: bool = self._call(lambda: self.world.create(key, data), late=(key, data))
        return answer

    def delete(self, keys: Iterable[str]) -> None:
        self._call(lambda: self.world.delete(keys))

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        raise NotImplementedError

    def put(self, key: str, data: bytes) -> None:
        raise NotImplementedError

    def list(self, prefix: str, after: str | None = None) -> list[Entry]:
        answer: list[Entry] = self._call(lambda: self.world.list(prefix, after))
        return answer


def _play(keep: int | None, deeds: Sequence[Sequence[str]], turns: Sequence[tuple[int, str | None]]) -> _World:
    """``turns`` are (writer, trouble); the number after the last writer's lets a late put land. Then all is quiet, and
    whoever has not finished does so, one after the other."""
    world, wins = _World(), dict[int, Value]()
    writers = [_Writer("abcd"[i], world, keep, mine, wins) for i, mine in enumerate(deeds)]
    for writer in writers:
        writer.start()
        writer.step(None)
    try:
        for who, trouble in turns:
            if who < len(writers):
                if not writers[who].done:
                    writers[who].step(trouble)
            elif world.on_their_way:
                world.create(*world.on_their_way.pop(0))
        for writer in writers:
            while not writer.done:
                writer.step(None)
    finally:
        for writer in writers:
            writer.end()
    _check_the_end(world, wins, keep)
    return world


def _check_the_end(world: _World, wins: dict[int, Value], keep: int | None) -> None:
    assert sorted(world.decided) == list(range(1, world.top + 1)), "a version was skipped"
    for number in range(2, world.top + 1):
        assert world.decided[number][:-1] == world.decided[number - 1], "a version was not built on the one before"
    for number, value in wins.items():
        assert world.decided[number] == value

    reader = _Writer("reader", world, keep, (), {})
    reader._call = lambda act, **_: act()  # type: ignore[method-assign]
    decided = [Version(value, number) for number, value in sorted(world.decided.items())]
    assert reader.ledger.read() == (decided[-1] if decided else Version(None, 0))
    assert reader.ledger.history() == (decided if keep is None else decided[-keep:])


_DEEDS = st.lists(st.sampled_from(("commit", "commit", "read", "newer")), min_size=1, max_size=6)
_TURNS = st.tuples(
    st.integers(0, 4),
    st.one_of(st.none(), st.none(), st.sampled_from(_TROUBLES)),
)


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    keep=st.sampled_from((2, 3, None)),
    deeds=st.lists(_DEEDS, min_size=2, max_size=4),
    turns=st.lists(_TURNS, max_size=60),
)
def test_no_interleaving_and_no_fault_gives_a_version_two_winners(
    keep: int | None, deeds: list[list[str]], turns: list[tuple[int, str | None]]
) -> None:
    _play(keep, deeds, turns)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    keep=st.sampled_from((2, 3)),
    base=st.integers(0, 5),
    asleep_for=st.integers(0, 3),
    others=st.integers(0, 8),
    wakes=st.lists(st.tuples(st.sampled_from((0, 0, 1, 2, 3)), st.sampled_from((None, *_TROUBLES))), max_size=20),
)
def test_a_sleeper_wins_nothing_wherever_it_fell_asleep(
    keep: int, base: int, asleep_for: int, others: int, wakes: list[tuple[int, str | None]]
) -> None:
    """Aimed where chance seldom goes: two sleepers fall asleep in the middle of a commit, versions come and are pruned,
    and then they wake amid each other."""
    sleeper = [*["read", "commit"] * 2, "commit", "newer", "commit"]
    runner = ["read", *["commit"] * 12]
    turns: list[tuple[int, str | None]] = [(1, None)] * (2 + 4 * base)
    turns += [(0, None)] * (2 + asleep_for) + [(2, None)] * (2 + asleep_for)
    turns += [(1, None)] * (4 * others)
    _play(keep, [sleeper, runner, sleeper], turns + wakes)


@pytest.mark.parametrize("keep", [2, 3])
def test_a_put_that_is_repeated_after_its_version_was_pruned_decides_nothing(keep: int) -> None:
    """It landed, others built on it and pruned it, and then the client's own second try lands once more."""
    runner = ["read", *["commit"] * 6]
    turns = [(0, "retried"), *[(1, None)] * 40, (0, None), (0, None), (0, None)]
    world = _play(keep, [["commit"], runner], turns)
    assert world.top == 7
