"""A node's part in one round: start the workers, ask them to stop, end them, and say how they ended."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from gpuctl.bootstrap.agent.worker_exits import NodeExitStatus, lost_checkpoint, rank_exit, verdict
from gpuctl.bootstrap.containers.command_lines import passed
from gpuctl.bootstrap.environments.install.uv import EnvironmentFailed
from gpuctl.bootstrap.jobs.old_jobs import UNSENT
from gpuctl.bootstrap.jobs.runtimes import Runtimes
from gpuctl.bootstrap.jobs.workspace import JobWorkspace
from gpuctl.bootstrap.launch import job_cgroup
from gpuctl.bootstrap.launch.interpreter import Launched, LauncherExit
from gpuctl.bootstrap.launch.memory import MemoryWatch
from gpuctl.bootstrap.launch.worker_ranks import ranks_left
from gpuctl.bootstrap.launch.worker_stop import WorkerStop
from gpuctl.bootstrap.mirror.mirror import Mirror
from gpuctl.bootstrap.monitors.stall import Activity, cpu_seconds
from gpuctl.bootstrap.ports import PortPool
from gpuctl.cluster.checkpoints.replica_layout import map_of
from gpuctl.cluster.clock import Clock
from gpuctl.cluster.disk import full_disk
from gpuctl.cluster.errors import CHECKPOINT_LOST, Fenced, GpuctlError
from gpuctl.cluster.membership.rounds import CANCELLED
from gpuctl.cluster.membership.stalls import STALLED
from gpuctl.cluster.records.nodes import TrainingProgress
from gpuctl.cluster.records.rounds import NodeExit, RankExit, Round
from gpuctl.cluster.worker_context import AWARE, DEADLINE, PROGRESS, STDERR_MARK, TIERS, WorkerContext
from gpuctl.trainers.diagnostics.net_plugin import FABRICS, complaint, missing_in
from gpuctl.trainers.launchers.descendants import catches, end_marked
from gpuctl.trainers.launchers.torchrun import LaunchSpec, WorkerFailure, needs_fresh

_ILL_S = 1.0
"""Within that, what has ended a worker is known to the GPUs' driver; no longer than ``RoundPolicy.blame_s``."""


class RoundRun:
    """This node's workers in one round. Built when a round names this node; ``exit`` is set once its workers are gone
    and the files they left under ``$GPUCTL_CHECKPOINT_DIR`` are in the bucket, and ``on_end`` is called.

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
        fabric: str = "",
        ill: Callable[[float], str] = lambda _: "",
    ) -> None:
        """``fabric``: what the machines are sold with (see ``Promised``); ``ill``: see ``GpuHealth.settle``."""
        self.round = round_
        self.rank = rank
        self.context = context
        self.exit: NodeExit | None = None
        self._workspace = workspace
        self._mirror = mirror
        self._clock = clock
        self._on_end = on_end
        self._token = token
        self._fabric = fabric if fabric in FABRICS and len(round_.members) > 1 else ""
        self._ill = ill
        self._launched: Launched | None = None
        self._cgroup = ""
        self._lock = threading.Lock()
        self._killed = False
        self._stop: WorkerStop | None = None
        self._memory = MemoryWatch(self._workers)

    @property
    def log_dir(self) -> Path:
        return self.context.round_dir / "logs"

    @property
    def base_rank(self) -> int:
        """Global rank of the worker with local rank 0 here."""
        return sum(member.nproc for member in self.round.members[: self.rank])

    def is_of(self, round_: Round) -> bool:
        return (round_.job, round_.number) == (self.round.job, self.round.number)

    def start(self, runtimes: Runtimes, ports: PortPool, base_env: dict[str, str]) -> None:
        """Launch in the background: the job's files may have to come first."""
        listening = ports.take(self.round.master_port) if self.rank == 0 else None
        threading.Thread(
            target=self._start,
            args=(runtimes, listening, base_env),
            name=f"run-{self.round.number}",
            daemon=True,
        ).start()

    def ask_to_stop(self, round_: Round) -> None:
        """Drain: the job's stop signal to each worker that catches it, once; the others go on until the deadline.

        Call it again on every turn of the loop. The end of the job, cancelled or stalled, is for all of them; those
        that stall write their stacks into their logs first.
        """
        stalled = round_.reason.startswith(STALLED)
        if round_.reason == CANCELLED and self._launched is None:
            self.kill()  # what it still waits for, such as its image, is not wanted any more
        if self._stop is None:
            deadline = self._clock.monotonic() + round_.drain_s
            self._stop = WorkerStop(self._clock, deadline, self._listens)
            with contextlib.suppress(OSError):  # then they do not know, and do their best
                (self.context.round_dir / DEADLINE).write_text(f"{deadline:.3f}")
        is_end = round_.reason == CANCELLED or stalled
        number, launched = self._workspace.stop_signal, self._launched is not None
        if self._stop.ask(self._workers(), launched=launched, everyone=is_end, stacks=stalled, number=number):
            self.kill()

    def kill(self) -> None:
        """End all processes of this run at once. The end is still reported through ``on_end``."""
        with self._lock:
            self._killed = True
            if self._launched:
                self._launched.kill()
        self._mirror.hurry()

    def is_drainable(self) -> bool:
        """All workers are up and catch the signal by which they are asked to stop, so a stop costs no step."""
        workers = self._workers()
        return len(workers) == self.round.members[self.rank].nproc and all(self._listens(pid) for pid in workers)

    def ranks_left(self) -> tuple[int, ...] | None:
        """Local ranks of the workers that have not ended; ``None`` if they have not begun, or it cannot be told."""
        if self._launched is None:
            return None
        nproc = self.round.members[self.rank].nproc
        return ranks_left(self.log_dir, nproc, self._launched.pid, self._workers())

    def progress(self) -> TrainingProgress | None:
        """What the workers last said of themselves; ``None`` if they say nothing."""
        try:
            said = msgspec.json.decode((self.context.round_dir / PROGRESS).read_bytes().strip(b" \n\0"))
            return msgspec.convert({**said, "job": self.round.job, "round": self.round.number}, TrainingProgress)
        except (OSError, msgspec.MsgspecError):
            return None

    def activity(self) -> Activity | None:
        """What the workers, with the processes they started, have done so far; ``None`` while there are none."""
        workers = self._workers()
        if not workers:
            return None
        progress = self.progress()
        return Activity(len(workers), progress.step if progress else None, cpu_seconds(workers))

    # -- in other threads ---------------------------------------------------------------------------------------------

    def _start(self, runtimes: Runtimes, listening: socket.socket | None, base_env: dict[str, str]) -> None:
        try:
            if self.rank == 0 and listening is None:
                self._end("stopped", [], "the port offered for this round is in use")
                return
            job = self._workspace.prepare()
            if job.image:
                runtimes.containers.fetch(job.image, lambda: self._killed)
                base_env = passed(base_env)
            found = runtimes.environments.have(job, self._workspace.code, self.round.members, lambda: self._killed)
            base_env = found.variables(base_env) if found else base_env
            self._mirror.restore(job.env)
            self._mirror.watch(self._workers)
            self._memory.start()
            spec = self._launch_spec(base_env)
            fabric = "" if job.allow_tcp else self._fabric
            if job.image:
                folder, end = self._workspace.folder, self._gone_for_good
                launched = runtimes.containers.launch(job.image, spec, folder, listening, on_exit=end, fabric=fabric)
            else:
                _require(fabric, spec.env)
                self._cgroup = job_cgroup.make(self.round.job, self.round.number, job_cgroup.delegated())
                spec = msgspec.structs.replace(spec, cgroup=self._cgroup)
                interpreter = runtimes.interpreters.take(found)
                launched = interpreter.launch(spec, listening, fresh=needs_fresh(job.env), on_exit=self._gone_for_good)
            with self._lock:
                self._launched = launched
                if self._killed:
                    launched.kill()
        except EnvironmentFailed as error:
            with contextlib.suppress(GpuctlError):
                self._workspace.end_as_failed(error)
            self._end("failed", [], error.message)
        except Fenced as error:
            self._end("stopped", [], str(error))
        except Exception as error:  # noqa: BLE001 - whatever it is, the job must hear of it
            self._end("failed", [], f"could not start: {error}")
        finally:
            if listening is not None:
                listening.close()

    def _launch_spec(self, base_env: dict[str, str]) -> LaunchSpec:
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
            script=self._workspace.program,
            args=self._workspace.spec.args,
            cwd=str(self._workspace.code),
            env={**self._workspace.worker_env(base_env), **self.context.env()},
            log_dir=str(self.log_dir),
            launcher=self._workspace.spec.launcher,
            hosts=tuple(one.address for one in self.round.members),
            nprocs=tuple(one.nproc for one in self.round.members),
        )

    def _tell_of_tiers(self) -> None:
        places = map_of(self.round, self.rank, self._workspace.tier, self._token)
        path = self.context.round_dir / TIERS
        path.touch(mode=0o600)  # it has the cluster's token in it
        path.write_bytes(msgspec.json.encode(places))

    def _gone_for_good(self, exited: LauncherExit) -> None:
        """Elsewhere, since the last files may take their time: whoever calls this has the next launch to serve."""
        threading.Thread(target=self._workers_gone, args=(exited,), name="run-end", daemon=True).start()

    def _workers_gone(self, exited: LauncherExit) -> None:
        job_cgroup.end(self._cgroup)
        end_marked(lambda folder: folder == self.context.round_dir)
        asked = self._stop is not None and self._stop.has_asked
        self._end(*verdict(exited, self.context.round_dir, self._memory, killed=self._killed, asked=asked))

    def _end(self, status: NodeExitStatus, failures: Sequence[WorkerFailure], message: str = "", code: int = 1) -> None:
        self._memory.stop()
        lost = self._mirror.finish(whole=status in ("completed", "drained"))
        lost = f"the last files in $GPUCTL_CHECKPOINT_DIR could not be saved: {lost}" if lost else ""
        if lost and status == "completed":  # then what it was all for is not safe
            status, message, lost, code = "failed", lost, "", CHECKPOINT_LOST
        member = self.round.members[self.rank]
        progress = self.progress()
        why = lost_checkpoint(self.context.round_dir)
        ranks = tuple(rank_exit(one, self.base_rank, self.log_dir, self._memory, self._clock, why) for one in failures)
        if lost or code == CHECKPOINT_LOST:
            with contextlib.suppress(OSError):
                (self.context.round_dir / f"{UNSENT}.files").touch()
        if lost:
            self._tell_in_logs(f"{lost}; the next round starts from the previous ones")
        elif status == "completed" and self.rank == 0 and (said := self._workspace.unused_strategy(self.round.number)):
            self._tell_in_logs(said)
        if status == "failed" and (full := full_disk(self.context.round_dir)):
            # Then no worker could write down what went wrong, and what it was is known.
            message, ranks = full, ()
        if message and not ranks:
            ranks = (
                RankExit(rank=self.base_rank, local_rank=0, exit_code=code, message=message, at=self._clock.time()),
            )
        self.exit = NodeExit(
            job=self.round.job,
            round=self.round.number,
            node=member.node,
            incarnation=member.incarnation,
            status=status,
            last_step=progress.step if progress else None,
            ranks=ranks,
            ill=self._ill(_ILL_S) if status == "failed" else "",
            at=self._clock.time(),
        )
        self._on_end()

    def _tell_in_logs(self, line: str) -> None:
        """Among what the first worker here printed: the agent's own log goes with the machine."""
        for path in sorted(self.log_dir.glob("*/attempt_0/0/stdout.log"))[:1]:
            with contextlib.suppress(OSError), path.open("a") as file:
                file.write(f"{STDERR_MARK.decode()}gpuctl: {line}\n")

    def _listens(self, pid: int) -> bool:
        """Whether a worker catches the signal. Where the kernel does not tell, those count that said so themselves."""
        if Path("/proc/self/status").exists():
            return catches(pid, self._workspace.stop_signal)
        return len(list(self.context.round_dir.glob(f"{AWARE}.*"))) == self.round.members[self.rank].nproc

    def _workers(self) -> list[int]:
        """Pids of the workers: the launcher's children."""
        return self._launched.workers() if self._launched else []


def _require(fabric: str, env: dict[str, str]) -> None:
    """Raises ``GpuctlError`` if there is a ``fabric`` and NCCL would go on over TCP."""
    if fabric and (missing := missing_in(fabric, env)):
        raise GpuctlError(complaint(fabric, missing, "on this node"))
