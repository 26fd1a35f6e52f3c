"""How a round's workers ended: what their exit codes, the files they left and the kernel say together."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

from gpuctl.bootstrap.launch.interpreter import LauncherExit
from gpuctl.bootstrap.launch.last_words import last_words, signal_name
from gpuctl.bootstrap.launch.memory import MemoryWatch
from gpuctl.cluster.clock import Clock
from gpuctl.cluster.errors import CHECKPOINT_LOST
from gpuctl.cluster.records.rounds import RankExit
from gpuctl.cluster.worker_context import AWARE, DRAINED, LOST
from gpuctl.trainers.launchers.torchrun import WorkerFailure

NodeExitStatus = Literal["completed", "drained", "failed", "stopped"]


class Verdict(NamedTuple):
    """How a node's part in a round ended."""

    status: NodeExitStatus
    failures: Sequence[WorkerFailure] = ()
    message: str = ""
    code: int = 1
    """Exit code for a failure that is no worker's own."""


def verdict(exited: LauncherExit, round_dir: Path, memory: MemoryWatch, *, killed: bool, asked: bool) -> Verdict:
    """Tell apart: completed, drained on request, ended by us, failed.

    Args:
        exited: how the launcher exited.
        round_dir: where workers leave marks.
        memory: what the kernel did to them.
        killed: whether we have ended them.
        asked: whether they were asked to stop.
    """
    seen = {path.name.split(".")[0] for path in round_dir.glob("*.*")}
    aware = AWARE in seen
    if exited.killed and not killed and memory.was_out_of_memory():
        # Not "stopped", which costs no restart: the next round would need as much.
        return Verdict("failed", (), "the kernel ran out of memory and killed the workers", 128 + signal.SIGKILL)
    if killed or exited.killed:
        return Verdict("stopped")
    if exited.error:
        return Verdict("failed", (), f"the launcher exited: {exited.error}")
    if DRAINED in seen:
        return Verdict("drained")
    if exited.failures:
        # A worker that knows nothing of draining dies of the signal; one that does, and fails, has failed.
        return Verdict("stopped" if asked and not aware else "failed", exited.failures)
    if LOST in seen:
        return Verdict(
            "failed", (), f"the last checkpoint is lost: {'; '.join(lost_checkpoint(round_dir))}", CHECKPOINT_LOST
        )
    # Exit code 0 after SIGTERM is, by custom, a checkpoint written, not a training finished.
    return Verdict("drained" if asked and not aware else "completed")


def rank_exit(
    failure: WorkerFailure, base_rank: int, log_dir: Path, memory: MemoryWatch, clock: Clock, lost: Sequence[str] = ()
) -> RankExit:
    """The record of one worker's failure.

    Args:
        failure: as the launcher told it.
        base_rank: the global rank of the node's first worker.
        log_dir: where the workers' output is.
        memory: what the kernel did to them.
        clock: for a worker that printed nothing.
        lost: see ``lost_checkpoint``. In an image a worker whose script dies of that ends with code 1, as any Python.
    """
    signal_ = signal_name(failure.exit_code)
    words = last_words(sorted(log_dir.glob(f"*/attempt_0/{failure.local_rank}/std*.log")), bool(signal_))
    if signal_ == "SIGKILL":
        words = replace(words, message=memory.why_killed(failure.pid), text="")
    died_of_loss = failure.exit_code == 1 and any(why in words.text for why in lost)
    return RankExit(
        rank=base_rank + failure.local_rank,
        local_rank=failure.local_rank,
        exit_code=CHECKPOINT_LOST if died_of_loss else failure.exit_code,
        signal=signal_,
        message=words.message,
        traceback=words.text,
        at=words.at or clock.time(),
    )


def lost_checkpoint(round_dir: Path) -> list[str]:
    """Why the newest checkpoint could not be kept, in the words of those who saved it; empty if it was."""
    with contextlib.suppress(OSError):
        return [path.read_text() for path in sorted(round_dir.glob(f"{LOST}.*"))]
    return []
