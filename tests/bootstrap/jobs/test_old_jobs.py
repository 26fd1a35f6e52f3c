"""Which folders of jobs a node removes."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from gpuctl.bootstrap.jobs.old_jobs import UNSENT, OldJobs
from gpuctl.cluster.agreement import ledgers
from gpuctl.cluster.clock import SystemClock
from gpuctl.cluster.records.rounds import JobOutcome, Round
from gpuctl.cluster.storage.bucket import Bucket, open_bucket

DAY_S = 86400.0


class Disk:
    """A node's folder of jobs, and how full its disk is."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "jobs"
        self.store: Bucket = open_bucket((folder / "bucket").as_uri())
        self.used = 0.5
        self.holds: int | None = None
        """How many folders of jobs it is full with, where that matters."""
        self.said: list[str] = []
        self.old = OldJobs(self.folder, self.store, SystemClock(), self.said.append, lambda _: self._used())

    def _used(self) -> float:
        return self.used if self.holds is None or len(self.left().split()) >= self.holds else 0.5

    def job(self, name: str, *, ended_days_ago: float | None = None, unsent: bool = False) -> None:
        round_dir = self.folder / name / "rounds" / "000001"
        round_dir.mkdir(parents=True)
        (self.folder / name / "code").mkdir()
        if unsent:
            (round_dir / UNSENT).touch()
        if ended_days_ago is not None:
            outcome = JobOutcome(result="succeeded", exit_code=0)
            assert ledgers.rounds(self.store, name).commit(
                Round(job=name, number=1, phase="ended", epoch=1, outcome=outcome), 0
            )
            (self.folder / name / "ended").touch()
            at = time.time() - ended_days_ago * DAY_S
            os.utime(self.folder / name / "ended", (at, at))

    def left(self) -> str:
        return " ".join(sorted(path.name for path in self.folder.iterdir()))


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path)


def test_the_newest_three_stay_and_others_for_a_day(disk: Disk) -> None:
    for days, name in enumerate("abcde"):
        disk.job(name, ended_days_ago=days + 0.5)
    disk.old.sweep(())
    assert disk.left() == "a b c"


def test_on_a_disk_that_is_nearly_full_only_the_newest_three_stay(disk: Disk) -> None:
    for minutes, name in enumerate("abcde"):
        disk.job(name, ended_days_ago=minutes / 1440)
    disk.old.sweep(())
    assert disk.left() == "a b c d e"
    disk.used = 0.81
    disk.old.sweep(())
    assert disk.left() == "a b c"


def test_no_more_goes_than_makes_room_and_the_oldest_goes_first(disk: Disk) -> None:
    for minutes, name in enumerate("cebda"):
        disk.job(name, ended_days_ago=minutes / 1440)
    disk.used, disk.holds = 0.81, 5
    disk.old.sweep(())
    assert disk.left() == "b c d e"
    assert disk.said == ["removing the files of finished job a"]


def test_on_a_full_disk_the_newest_three_make_room_for_the_fourth(disk: Disk) -> None:
    for minutes, name in enumerate("cba"):
        disk.job(name, ended_days_ago=minutes / 1440, unsent=name == "a")
    disk.job("running")
    disk.used, disk.holds = 0.96, 4
    disk.old.sweep({"running"})
    assert disk.left() == "a c running"


def test_a_job_that_runs_for_weeks_keeps_the_newest_three_of_its_rounds(disk: Disk) -> None:
    disk.job("long")
    for number in range(1, 8):
        folder = disk.folder / "long" / "rounds" / f"{number:06}"
        folder.mkdir(exist_ok=True)
        if number == 2:
            (folder / UNSENT).touch()
        at = time.time() - (7.5 - number) * DAY_S / 4
        os.utime(folder, (at, at))

    def rounds() -> list[int]:
        return sorted(int(path.name) for path in (disk.folder / "long" / "rounds").iterdir())

    disk.old.sweep({"long"})
    assert rounds() == [2, 4, 5, 6, 7]
    disk.used = 0.99
    disk.old.sweep({"long"})
    assert rounds() == [2, 5, 6, 7]
    assert disk.said == [f"removing the files of round {number} of long" for number in (1, 3, 4)]


def test_what_is_not_in_the_bucket_yet_stays_for_a_week(disk: Disk) -> None:
    for days, name in enumerate("abc"):
        disk.job(name, ended_days_ago=days / 100)
    disk.job("d", ended_days_ago=6.9, unsent=True)
    disk.job("e", ended_days_ago=7.1, unsent=True)
    disk.used = 0.94
    disk.old.sweep(())
    assert disk.left() == "a b c d"


def test_a_job_that_is_not_known_to_be_over_stays(disk: Disk) -> None:
    """The agent may just have started, and not have met the others yet."""
    disk.used = 0.94
    for name in "abcdef":
        disk.job(name, ended_days_ago=3)
    disk.job("running")
    disk.old.sweep({"a"})
    left = disk.left().split()
    assert "running" in left and "a" in left and len(left) == 5


def test_a_folder_of_an_earlier_life_of_the_agent_counts_from_when_it_is_found(disk: Disk) -> None:
    for name in "abcd":
        disk.job(name, ended_days_ago=3)
        (disk.folder / name / "ended").unlink()
    disk.old.sweep(())
    assert disk.left() == "a b c d"
    assert all((disk.folder / name / "ended").exists() for name in "abcd")
