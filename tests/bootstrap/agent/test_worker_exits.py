"""How a round's workers ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuctl.bootstrap.agent.worker_exits import lost_checkpoint, rank_exit, verdict
from gpuctl.bootstrap.launch.interpreter import LauncherExit
from gpuctl.bootstrap.launch.memory import MemoryWatch
from gpuctl.cluster.errors import CHECKPOINT_LOST
from gpuctl.cluster.worker_context import AWARE, DRAINED, LOST
from gpuctl.trainers.launchers.torchrun import WorkerFailure
from tests.fakes.clock import HandClock

FAILURE = WorkerFailure(local_rank=0, exit_code=1)
DONE, FAILED, KILLED = LauncherExit(), LauncherExit((FAILURE,)), LauncherExit(killed=True)
ASKED = LauncherExit((WorkerFailure(local_rank=0, exit_code=143),))


class Kernel(MemoryWatch):
    """Says what it is told to."""

    def __init__(self, *, starved: bool) -> None:
        super().__init__(list)
        self._starved = starved

    def was_out_of_memory(self) -> bool:
        return self._starved


@pytest.mark.parametrize(
    ("exited", "marks", "asked", "expected"),
    [
        (DONE, [], False, ("completed", 1)),
        (DONE, [], True, ("drained", 1)),
        (DONE, [AWARE], True, ("completed", 1)),
        (DONE, [AWARE, DRAINED], True, ("drained", 1)),
        (ASKED, [], True, ("stopped", 1)),
        (ASKED, [AWARE], True, ("failed", 1)),
        (FAILED, [AWARE, DRAINED], True, ("drained", 1)),
        (FAILED, [], False, ("failed", 1)),
        (DONE, [AWARE, LOST], False, ("failed", CHECKPOINT_LOST)),
        (KILLED, [], False, ("stopped", 1)),
        (LauncherExit(error="no such image"), [], False, ("failed", 1)),
    ],
)
def test_marks_and_exit_codes_say_together_how_it_ended(
    tmp_path: Path, exited: LauncherExit, marks: list[str], asked: bool, expected: tuple[str, int]
) -> None:
    for mark in marks:
        (tmp_path / f"{mark}.0").write_text("why")
    found = verdict(exited, tmp_path, Kernel(starved=False), killed=False, asked=asked)
    assert (found.status, found.code) == expected
    assert verdict(exited, tmp_path, Kernel(starved=True), killed=True, asked=asked).status == "stopped", "by ourselves"


def test_workers_that_ended_with_their_launcher_for_want_of_memory_have_failed(tmp_path: Path) -> None:
    """Were it the loss of a node, the job would begin anew for ever, and count no restart."""
    found = verdict(KILLED, tmp_path, Kernel(starved=True), killed=False, asked=False)
    assert (found.status, found.code) == ("failed", 137)
    assert "out of memory" in found.message


def test_a_script_in_an_image_that_dies_of_a_lost_checkpoint_has_the_code_for_it(tmp_path: Path) -> None:
    (tmp_path / f"{LOST}.0").write_text("the checkpoint of step 1 was not written")
    log = tmp_path / "logs" / "run" / "attempt_0" / "0" / "stdout.log"
    log.parent.mkdir(parents=True)
    for said, code in (("GpuctlError: the checkpoint of step 1 was not written", CHECKPOINT_LOST), ("KeyError: 1", 1)):
        log.write_text(f'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\n{said}\n')
        lost = lost_checkpoint(tmp_path)
        found = rank_exit(FAILURE, 4, tmp_path / "logs", Kernel(starved=False), HandClock(), lost)
        assert (found.exit_code, found.rank, found.message) == (code, 4, said)
