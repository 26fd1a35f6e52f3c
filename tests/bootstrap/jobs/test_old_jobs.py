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
        self.old = OldJobs(self.folder, self.store, SystemClock(), print, lambda _: self.used)

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


def test_what_is_not_in_the_bucket_yet_stays_for_a_week(disk: Disk) -> None:
    for days, name in enumerate("abc"):
        disk.job(name, ended_days_ago=days / 100)
    disk.job("d", ended_days_ago=6.9, unsent=True)
    disk.job("e", ended_days_ago=7.1, unsent=True)
    disk.used = 0.99
    disk.old.sweep(())
    assert disk.left() == "a b c d"


def test_a_job_that_is_not_known_to_be_over_stays(disk: Disk) -> None:
    """The agent may just have started, and not have met the others yet."""
    disk.used = 0.99
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
