"""When a folder is whole, by a clock that the tests set: no file is read, none is there."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest

from gpuctl.bootstrap.mirror.quiescence import RESTLESS_S, QuiescenceTracker
from gpuctl.bootstrap.mirror.watched_folder import FileStamp

QUIET_S = 1.0
LOOK_S = 0.25
BOUND_S = 3 * QUIET_S


class Looked:
    """A folder, looked at four times a second; ``sets`` has each set with its time."""

    def __init__(self, *paths: str) -> None:
        self.now = 0.0
        self.sets: list[tuple[float, set[str]]] = []
        self.open: set[str] = set()
        self.is_made = True
        """Whether sets reach the bucket."""
        self._inode = 0
        self._seen: dict[str, FileStamp] = {}
        for path in paths:
            self.write(path)
        self._stillness = QuiescenceTracker(dict(self._seen), QUIET_S)

    def write(self, path: str) -> None:
        """As a rename puts a whole file there."""
        self._inode += 1
        self._seen[path] = FileStamp(1, self._inode, 10, self._inode)

    def remove(self, path: str) -> None:
        del self._seen[path]

    def pass_by(self, seconds: float, before_look: Callable[[int], None] = lambda _number: None) -> None:
        """``before_look`` is called with the number of each look."""
        for number in range(round(seconds / LOOK_S)):
            self.now += LOOK_S
            before_look(number)
            chosen = self._stillness.look(dict(self._seen), frozenset(self.open), self.now)
            if chosen is not None:
                self.sets.append((self.now, set(chosen)))
                if self.is_made:
                    self._stillness.made()

    @property
    def loose(self) -> set[str]:
        return set(self._stillness.loose)


def test_a_stream_of_new_files_does_not_keep_the_others_from_a_set() -> None:
    folder = Looked()
    folder.write("last.ckpt")
    folder.pass_by(20, lambda n: folder.write(f"samples/{n // 3}.png") if n % 3 == 0 else None)  # one in 0.75 s
    first, files = folder.sets[0]
    assert first == LOOK_S + BOUND_S
    assert "last.ckpt" in files
    assert "samples/0.png" in files and f"samples/{round(first / LOOK_S - 1) // 3}.png" not in files, "not at rest"
    times = [at for at, _ in folder.sets]
    assert {b - a for a, b in pairwise(times)} == {BOUND_S}, "not a set with each look either"


def test_what_was_left_out_is_taken_once_it_is_at_rest() -> None:
    folder = Looked()
    folder.pass_by(BOUND_S + LOOK_S, lambda n: folder.write(f"{n}"))
    (at, files) = folder.sets[-1]
    folder.pass_by(QUIET_S)
    assert folder.sets[-1] == (at + QUIET_S, files | {str(n) for n in range(13)})


def test_files_that_are_written_one_after_the_other_are_one_set() -> None:
    folder = Looked("old")
    folder.pass_by(2 * QUIET_S)
    before = len(folder.sets)
    for name in ("model", "optimizer", "scheduler"):
        folder.write(name)
        folder.pass_by(QUIET_S - LOOK_S)
    folder.pass_by(2 * QUIET_S)
    assert folder.sets[before][1] == {"old", "model", "optimizer", "scheduler"}


def test_beside_a_stream_a_set_waits_for_the_last_of_its_files_to_be_closed_and_at_rest() -> None:
    folder = Looked()

    def stream(number: int) -> None:
        folder.write(f"sample-{number}")

    folder.write("model")
    folder.write("optimizer")
    folder.open = {"optimizer"}
    folder.pass_by(60, stream)
    assert folder.sets == [], "the other half is open"
    folder.open = set()
    folder.write("optimizer")
    folder.pass_by(BOUND_S + LOOK_S, stream)
    assert [{"model", "optimizer"} <= files for _, files in folder.sets] == [True]


def test_a_folder_where_always_another_file_is_open_is_waited_for_ten_minutes() -> None:
    folder = Looked()
    folder.write("model")

    def stream(number: int) -> None:
        folder.write(f"{number}.pt")
        folder.open = {f"{number}.pt"}

    folder.pass_by(RESTLESS_S + LOOK_S, stream)
    ((at, files),) = folder.sets
    assert at == LOOK_S + RESTLESS_S
    assert {"model", "0.pt"} <= files and "2400.pt" not in files


@pytest.mark.parametrize("each", [1, 2, 3])
def test_who_removes_the_older_file_with_each_new_one_has_the_newest_in_every_set(each: int) -> None:
    folder = Looked()

    def rotate(number: int) -> None:
        if number % each == 0:
            folder.write(f"{number // each}.pt")
            if number:
                folder.remove(f"{number // each - 1}.pt")

    folder.pass_by(20, rotate)
    assert len(folder.sets) == 6
    for at, files in folder.sets:
        assert files == {f"{round(at / LOOK_S - 1) // each}.pt"}


def test_a_removal_counts_until_a_set_is_made() -> None:
    folder = Looked("old.pt")

    folder.is_made = False
    folder.remove("old.pt")
    folder.pass_by(BOUND_S + LOOK_S, lambda number: folder.write(f"{number}.pt"))
    folder.is_made = True
    folder.pass_by(2 * BOUND_S, lambda number: folder.write(f"{13 + number}.pt"))
    latest = [f"{round(at / LOOK_S - 1)}.pt" for at, _ in folder.sets]
    assert [name in files for name, (_, files) in zip(latest, folder.sets, strict=True)] == [True, True, False]


def test_a_set_may_lack_a_log_and_what_never_rests_but_no_file_that_is_at_rest() -> None:
    folder = Looked("model", "run.log")
    folder.pass_by(LOOK_S)
    folder.pass_by(2 * BOUND_S, lambda _: folder.write("state"))
    assert folder.sets[-1][1] == {"model", "run.log", "state"}
    assert folder.loose == {"run.log", "state"}
    folder.write("old")
    folder.pass_by(2 * QUIET_S, lambda _: folder.write("state"))
    folder.remove("old")
    folder.sets.clear()
    while not folder.sets:
        folder.pass_by(LOOK_S, lambda _: folder.write("state"))
    assert folder.loose == {"run.log"}, "what was removed may have been the older state"


def test_removals_hold_a_set_back_but_not_for_ever() -> None:
    folder = Looked(*map(str, range(80)), "model")
    folder.pass_by(20, lambda n: folder.remove(str(n)))
    assert folder.sets[0][0] == LOOK_S + BOUND_S
    assert all("model" in files for _, files in folder.sets)


def test_a_file_that_is_open_for_good_holds_nothing_back_after_its_ten_minutes() -> None:
    folder = Looked()
    folder.write("output.txt")
    folder.open = {"output.txt"}
    folder.pass_by(RESTLESS_S + QUIET_S)
    folder.sets.clear()
    wrote_at = folder.now
    folder.write("model")
    folder.pass_by(5)
    assert folder.sets[0] == (wrote_at + LOOK_S + QUIET_S, {"model"})
