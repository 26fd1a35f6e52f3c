"""A node's part in one round: start the workers, ask them to stop, end them, and say how they ended."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from gpuctl.bootstrap.container import passed
from gpuctl.bootstrap.interpreter import Ending, Interpreter, Launched
from gpuctl.bootstrap.mirror import Mirror
from gpuctl.bootstrap.ports import PortPool
from gpuctl.bootstrap.runtime import Containers
from gpuctl.bootstrap.stall import Effort, cpu_seconds
from gpuctl.bootstrap.workspace import JobWorkspace
from gpuctl.cluster.clock import Clock
from gpuctl.cluster.errors import Fenced
from gpuctl.cluster.records import NodeExit, Progress, RankExit, Round
from gpuctl.cluster.rounds import CANCELLED, STALLED
from gpuctl.cluster.tiers import map_of
from gpuctl.cluster.worker import AWARE, DEADLINE, DRAINED, PROGRESS, TIERS, WorkerContext
from gpuctl.trainers.launch import LaunchSpec, WorkerFailure, needs_fresh

NodeExitStatus = Literal["completed", "drained", "failed", "stopped"]

_TRACEBACK_CHARS = 8000
_FULL_BYTES = 64 * 1024


class Run:
    """Built when a round names this node; ``exit`` is set once its workers are gone and the files they left under
    ``$GPUCTL_CHECKPOINT_DIR`` are in the bucket, and ``on_end`` is called.

    The agent's loop drives it (``start``, ``ask_to_stop``, ``kill``); the end comes from another thread.
    """

    def __init__(
        self,
        round_: Round,
        rank: int,
        workspace: JobWorkspace,
        context: WorkerContext,
        mirror: Mirror,
        clock: Clock,
        on_end: Callable[[], None],
        token: str = "",
    ) -> None:
        self.round = round_
        self.rank = rank
        self.context = context
        self.exit: NodeExit | None = None
        self._workspace = workspace
        self._mirror = mirror
        self._clock = clock
        self._on_end = on_end
        self._token = token
        self._launched: Launched | None = None
        self._lock = threading.Lock()
        self._killed = False
        self._asked: set[int] = set()
        self._give_up_at: float | None = None

    @property
    def log_dir(self) -> Path:
        return self.context.round_dir / "logs"

    @property
    def base_rank(self) -> int:
        """Global rank of the worker with local rank 0 here."""
        return sum(member.nproc for member in self.round.members[: self.rank])

    def is_of(self, round_: Round) -> bool:
        return (round_.job, round_.number) == (self.round.job, self.round.number)

    def start(
        self, interpreter: Interpreter, containers: Containers, ports: PortPool, base_env: dict[str, str]
    ) -> None:
        """Launch in the background: the job's files may have to come first."""
        listening = ports.take(self.round.master_port) if self.rank == 0 else None
        threading.Thread(
            target=self._start,
            args=(interpreter, containers, listening, base_env),
            name=f"run-{self.round.number}",
            daemon=True,
        ).start()

    def ask_to_stop(self, round_: Round) -> None:
        """Drain: SIGTERM to each worker that catches it, once; the others go on until the deadline.

        Call it again on every turn of the loop: a worker that has only just started catches nothing yet. The end of the
        job, cancelled or stalled, is for all of them.
        """
        is_end = round_.reason == CANCELLED or round_.reason.startswith(STALLED)
        now = self._clock.monotonic()
        if round_.reason == CANCELLED and self._launched is None:
            self.kill()  # what it still waits for, such as its image, is not wanted any more
        if self._give_up_at is None:
            self._give_up_at = now + round_.drain_s
            with contextlib.suppress(OSError):  # then they do not know, and do their best
                (self.context.round_dir / DEADLINE).write_text(f"{self._give_up_at:.3f}")
        for pid in self._workers():
            if pid not in self._asked and (is_end or self._listens(pid)):
                self._asked.add(pid)
                _signal(pid, signal.SIGTERM)
        if now > self._give_up_at:
            self.kill()

    def kill(self) -> None:
        """End all processes of this run at once. The end is still reported through ``on_end``."""
        with self._lock:
            self._killed = True
            if self._launched:
                self._launched.kill()
        self._mirror.hurry()

    def is_drainable(self) -> bool:
        """All workers are up and catch SIGTERM, so a stop costs no step."""
        workers = self._workers()
        return len(workers) == self.round.members[self.rank].nproc and all(self._listens(pid) for pid in workers)

    def progress(self) -> Progress | None:
        """What the workers last said of themselves; ``None`` if they say nothing."""
        try:
            said = msgspec.json.decode((self.context.round_dir / PROGRESS).read_bytes().strip(b" \n\0"))
            return msgspec.convert({**said, "job": self.round.job, "round": self.round.number}, Progress)
        except (OSError, msgspec.MsgspecError):
            return None

    def effort(self) -> Effort | None:
        """What the workers, with the processes they started, have done so far; ``None`` while there are none."""
        workers = self._workers()
        if not workers:
            return None
        progress = self.progress()
        return Effort(len(workers), progress.step if progress else None, cpu_seconds(workers))

    # -- in other threads ---------------------------------------------------------------------------------------------

    def _start(
        self,
        interpreter: Interpreter,
        containers: Containers,
        listening: socket.socket | None,
        base_env: dict[str, str],
    ) -> None:
        try:
            if self.rank == 0 and listening is None:
                self._end("stopped", [], "the port offered for this round is gone")
                return
            job = self._workspace.prepare()
            if job.image:
                containers.fetch(job.image, lambda: self._killed)
                base_env = passed(base_env)
            self._mirror.restore(job.env)
            self._mirror.watch(self._workers)
            spec = self._launch_spec(base_env, job.env)
            if job.image:
                folder, end = self._workspace.folder, self._gone_for_good
                launched = containers.launch(job.image, spec, folder, listening, on_exit=end)
            else:
                launched = interpreter.launch(spec, listening, fresh=needs_fresh(job.env), on_exit=self._gone_for_good)
            with self._lock:
                self._launched = launched
                if self._killed:
                    launched.kill()
        except Fenced as error:
            self._end("stopped", [], str(error))
        except Exception as error:  # noqa: BLE001 - whatever it is, the job must hear of it
            self._end("failed", [], f"could not start: {error}")
        finally:
            if listening is not None:
                listening.close()

    def _launch_spec(self, base_env: dict[str, str], job_env: dict[str, str]) -> LaunchSpec:
        member = self.round.members[self.rank]
        for folder in (self.context.round_dir, self.context.checkpoint_dir, self.context.tensorboard_dir):
            folder.mkdir(parents=True, exist_ok=True)
        self._tell_of_tiers()
        return LaunchSpec(
            job=self.round.job,
            round=self.round.number,
            rank=self.rank,
            nodes=len(self.round.members),
            nproc=member.nproc,
            address=member.address,
            master_address=self.round.master_address,
            master_port=self.round.master_port,
            script=str(self._workspace.code / self._workspace.spec.script),
            args=self._workspace.spec.args,
            cwd=str(self._workspace.code),
            env={**base_env, **job_env, **self.context.env()},
            log_dir=str(self.log_dir),
        )

    def _tell_of_tiers(self) -> None:
        places = map_of(self.round, self.rank, self._workspace.tier, self._token)
        path = self.context.round_dir / TIERS
        path.touch(mode=0o600)  # it has the cluster's token in it
        path.write_bytes(msgspec.json.encode(places))

    def _gone_for_good(self, ending: Ending) -> None:
        """Elsewhere, since the last files may take their time: whoever calls this has the next launch to serve."""
        threading.Thread(target=self._workers_gone, args=(ending,), name="run-end", daemon=True).start()

    def _workers_gone(self, ending: Ending) -> None:
        """Tell apart: completed, drained on request, ended by us, failed."""
        seen = {path.name.split(".")[0] for path in self.context.round_dir.glob("*.*")}
        aware = AWARE in seen
        if self._killed or ending is None:
            self._end("stopped", [])
        elif isinstance(ending, str):
            self._end("failed", [], f"the launcher ended: {ending}")
        elif DRAINED in seen:
            self._end("drained", [])
        elif ending:
            # A worker that knows nothing of draining dies of the signal; one that does, and fails, has failed.
            self._end("stopped" if self._asked and not aware else "failed", ending)
        else:
            # Exit code 0 after SIGTERM is, by custom, a checkpoint written, not a training finished.
            self._end("drained" if self._asked and not aware else "completed", [])

    def _end(self, status: NodeExitStatus, failures: list[WorkerFailure], message: str = "") -> None:
        lost = self._mirror.finish(whole=status in ("completed", "drained"))
        lost = f"the last files in $GPUCTL_CHECKPOINT_DIR could not be kept: {lost}" if lost else ""
        if lost and status == "completed":  # then what it was all for is not safe
            status, message, lost = "failed", lost, ""
        member = self.round.members[self.rank]
        progress = self.progress()
        ranks = tuple(self._rank_exit(failure) for failure in failures)
        if lost:
            self._tell_in_logs(f"{lost}; the next round begins with those before")
        if status == "failed" and _is_full(self.context.round_dir):
            # Then no worker could write down what went wrong, and what it was is known.
            message, ranks = f"no space left on the disk that holds {self.context.round_dir}", ()
        if message and not ranks:
            ranks = (RankExit(rank=self.base_rank, local_rank=0, exit_code=1, message=message, at=self._clock.time()),)
        self.exit = NodeExit(
            job=self.round.job,
            round=self.round.number,
            node=member.node,
            incarnation=member.incarnation,
            status=status,
            last_step=progress.step if progress else None,
            ranks=ranks,
            at=self._clock.time(),
        )
        self._on_end()

    def _tell_in_logs(self, line: str) -> None:
        """Among what the first worker here printed: the agent's own log goes with the machine."""
        for path in sorted(self.log_dir.glob("*/attempt_0/0/stderr.log"))[:1]:
            with contextlib.suppress(OSError), path.open("a") as file:
                file.write(f"gpuctl: {line}\n")

    def _rank_exit(self, failure: WorkerFailure) -> RankExit:
        text, at = "", self._clock.time()
        for path in self.log_dir.glob(f"*/attempt_0/{failure.local_rank}/stderr.log"):
            text, at = _traceback(path), path.stat().st_mtime
        lines = text.splitlines()
        return RankExit(
            rank=self.base_rank + failure.local_rank,
            local_rank=failure.local_rank,
            exit_code=failure.exit_code,
            message=lines[-1][:500] if lines else "",
            traceback=text,
            at=at,
        )

    def _listens(self, pid: int) -> bool:
        """Whether a worker catches SIGTERM. Where the kernel does not tell, those count that said so themselves."""
        if Path("/proc/self/status").exists():
            return _catches_sigterm(pid)
        return len(list(self.context.round_dir.glob(f"{AWARE}.*"))) == self.round.members[self.rank].nproc

    def _workers(self) -> list[int]:
        """Pids of the workers: the launcher's children."""
        return self._launched.workers() if self._launched else []


def _is_full(folder: Path) -> bool:
    try:
        return shutil.disk_usage(folder).free < _FULL_BYTES
    except FileNotFoundError:  # it failed before it came to that
        return False


def _traceback(stderr: Path) -> str:
    """The last traceback in a worker's stderr, else its last lines."""
    with stderr.open("rb") as file:
        file.seek(max(0, stderr.stat().st_size - 64 * 1024))
        text = file.read().decode(errors="replace")
    start = text.rfind("Traceback (most recent call last)")
    return text[start:].strip()[:_TRACEBACK_CHARS] if start >= 0 else "\n".join(text.strip().splitlines()[-5:])


def _catches_sigterm(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/status", encoding="ascii") as status:  # noqa: PTH123
            caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", status.read(), re.MULTILINE)
    except OSError:
        return False
    return caught is not None and bool(int(caught[1], 16) >> (signal.SIGTERM - 1) & 1)


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
