"""What of the workers' output reaches the bucket, and when."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpuctl.bootstrap.agent.log_shipper import LogShipper
from gpuctl.bootstrap.agent.round_run import RoundRun
from gpuctl.bootstrap.jobs.workspace import JobWorkspace
from gpuctl.bootstrap.mirror.mirror import Mirror
from gpuctl.bootstrap.mirror.watched_folder import WatchedFolder
from gpuctl.cluster import layout
from gpuctl.cluster.clock import SystemClock
from gpuctl.cluster.records.rounds import Member, Round
from gpuctl.cluster.storage.bucket import Bucket, open_bucket
from gpuctl.cluster.storage.streams import StreamReader
from gpuctl.cluster.worker_context import STDERR_MARK, WorkerContext
from tests.waiting import until


class Clock(SystemClock):
    """A wall clock that stands until it is told."""

    now = 1000.0

    def time(self) -> float:
        return self.now


class Output:
    """A round's worker, whose output the test writes, and the log that comes of it."""

    def __init__(self, folder: Path) -> None:
        self.store: Bucket = open_bucket((folder / "bucket").as_uri())
        workspace = JobWorkspace(self.store, folder / "jobs" / "job-1", "job-1")
        context = WorkerContext(
            cluster="default",
            bucket=self.store.url,
            job="job-1",
            round=1,
            node="node-0",
            round_dir=workspace.round_dir(1),
            checkpoint_dir=workspace.folder / "checkpoints",
            tensorboard_dir=workspace.round_dir(1) / "tensorboard",
        )
        member = Member(node="node-0", incarnation="i", address="127.0.0.1", nproc=1)
        round_ = Round(job="job-1", number=1, phase="run", epoch=1, members=(member,))
        self.clock = Clock()
        mirror = Mirror(self.store, WatchedFolder(context.checkpoint_dir), round_, 0, self.clock, print)
        self.run = RoundRun(round_, 0, workspace, context, mirror, self.clock, lambda: None)
        path = self.run.log_dir / "x" / "attempt_0" / "0" / "stdout.log"
        path.parent.mkdir(parents=True)
        self._file = path.open("wb", buffering=0)
        self.shipper = LogShipper(self.store, self.run, self.clock)

    def write(self, data: bytes) -> None:
        self._file.write(data)

    def lines(self) -> list[dict[str, Any]]:
        return [line for _, _, line in StreamReader(self.store, layout.logs("job-1")).read()]

    def texts(self) -> list[str]:
        return [line["text"] for line in self.lines()]

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        until(condition, what)

    def look(self) -> None:
        """Until the shipper has looked once more: it takes whole lines along at each look."""
        before = len(self.lines())
        self.write(b"look\n")
        self.wait(lambda: len(self.lines()) > before, "another line")


@pytest.fixture
def output(tmp_path: Path) -> Output:
    return Output(tmp_path)


def test_lines_are_told_apart_by_their_stream_without_the_marks(output: Output) -> None:
    output.write(b"out\n" + STDERR_MARK + b"err\nout again\n")
    output.shipper.finish()
    assert [(line["stream"], line["text"]) for line in output.lines()] == [
        ("stdout", "out"),
        ("stderr", "err"),
        ("stdout", "out again"),
    ]


def test_a_bar_is_sent_every_few_seconds_as_it_looks_then(output: Output) -> None:
    mark = STDERR_MARK
    output.look()
    output.write(mark + b"\r  1%" + mark + b"\r  2%")
    output.clock.now += 2.9
    output.clock.now += 0.2
    output.wait(lambda: "  2%" in output.texts(), "the bar")
    output.write(mark + b"\r 50%")
    output.clock.now += 3.1
    output.wait(lambda: " 50%" in output.texts(), "the bar's next state")
    output.write(mark + b"\r100%\ndone\n")
    output.shipper.finish()
    found = [(line["text"], line.get("partial", False)) for line in output.lines()]
    assert found == [("look", False), ("  2%", True), (" 50%", True), ("100%", False), ("done", False)]


def test_what_is_only_half_written_is_no_line_yet(output: Output) -> None:
    output.write(b"begins ")
    output.clock.now += 2.9
    output.shipper._ship(last=False)
    output.shipper._ship(last=False)
    assert output.texts() == []
    output.write(b"and ends\n")
    output.shipper.finish()
    assert output.texts() == ["begins and ends"]


def test_a_bar_that_stays_as_it_is_is_sent_once(output: Output) -> None:
    output.write(b"\rwaiting")
    output.shipper._ship(last=False)
    for _ in range(5):
        output.clock.now += 60
        output.shipper._ship(last=False)
    assert output.texts() == ["waiting"]


def test_hours_of_a_bar_leave_one_line_in_the_log(output: Output) -> None:
    for i in range(3):
        output.write(b"".join(b"\r%5d" % n for n in range(i * 10000, i * 10000 + 10000)))
        output.shipper._ship(last=False)
    output.write(b"\n")
    output.shipper.finish()
    assert output.texts() == ["29999"]
