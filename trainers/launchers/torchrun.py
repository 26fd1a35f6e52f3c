"""Starting one node's workers for one round, with torchrun's own launcher.

torchrun's elasticity is not used (see ``docs/decisions``): each round is a static launch with ``max_restarts=0``, its
rendezvous a fresh TCPStore on a port that rank 0's agent has held open since before the round was decided.

Call ``launch`` in a process of its own: one forked from a ``warm_interpreter`` has its workers up in 0.1-0.3 s. For
jobs that need a new interpreter (see ``needs_fresh``) such a fork becomes ``python -m
gpuctl.trainers.launchers.torchrun``, which does the same, in 3 s and more.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import linecache
import multiprocessing.process
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from gpuctl.cluster.errors import CHECKPOINT_LOST, Fenced, GpuctlError
from gpuctl.cluster.worker_context import STDERR_MARK
from gpuctl.trainers import gloo_exit, stack_signal
from gpuctl.trainers.launchers.adapter import World
from gpuctl.trainers.launchers.descendants import end_holders
from gpuctl.trainers.log_output import LogFile, to_log

TORCHRUN = "torchrun"
"""The launcher of jobs that name no other."""


class LaunchSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What one node needs to know to start its workers."""

    job: str
    round: int
    rank: int
    """The node's rank: torchrun's group rank."""
    nodes: int
    nproc: int
    address: str
    """Of this node."""
    master_address: str
    master_port: int
    script: str
    """Absolute path."""
    args: tuple[str, ...]
    cwd: str
    env: dict[str, str]
    """The workers' whole environment but for what torchrun adds."""
    log_dir: str
    cgroup: str = ""
    """Folder of the cgroup for all that is started; empty: none."""
    launcher: str = TORCHRUN
    """As ``--launcher`` names it. Any other is ``process_group``'s."""
    hosts: tuple[str, ...] = ()
    """Address of each node, by rank."""
    nprocs: tuple[int, ...] = ()
    """Number of workers on each."""

    @property
    def run_id(self) -> str:
        return f"{self.job}-{self.round}"

    @property
    def world(self) -> World:
        """The round, for a launcher that is not torchrun."""
        return World(self.job, self.round, self.rank, self.hosts, self.nprocs, self.master_address, self.master_port)


class WorkerFailure(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that did not end with exit code 0."""

    local_rank: int
    exit_code: int
    """As the shell has it: 128 + signal number."""
    pid: int = 0
    """0: not known."""


WORKER_SITE = str(Path(__file__).parent / "worker_site")
"""Folder with the ``sitecustomize`` of a worker's interpreters."""

_BACKEND = "gpuctl-round"
"""Of torchrun's rendezvous, here where the round is known; ``gpuctl`` is that of the plug-in for torchrun itself."""
_ONLY_AT_START = ("LD_", "DYLD_", "PYTHON", "OMP_", "KMP_", "MKL_", "OPENBLAS_", "TORCH_", "PYTORCH_")


def needs_fresh(env: Mapping[str, str]) -> bool:
    """Whether a job's variables are of the kind that is read only when a process starts or torch is imported."""
    return any(name.startswith(_ONLY_AT_START) for name in env)


def launch(spec: LaunchSpec, listening: int | None) -> list[WorkerFailure]:
    """Run the round's workers on this node and return those that failed. Call it in a process of its own.

    ``listening`` is the file descriptor of the master's listening socket, on rank 0 only.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch
    from torch.numa.binding import AffinityMode, NumaOptions

    from gpuctl.trainers.launchers import worker_processes

    worker_processes.install()
    # Interpreters that a worker starts, or becomes by ``os.exec*``, see to their end as well.
    os.environ["PYTHONPATH"] = os.pathsep.join([WORKER_SITE, *filter(None, [os.environ.get("PYTHONPATH")])])
    signal.signal(signal.SIGCHLD, end_leftovers)
    rendezvous_handler_registry.register(_BACKEND, lambda _: _static_rendezvous(spec, listening))
    config = LaunchConfig(
        min_nodes=spec.nodes,
        max_nodes=spec.nodes,
        nproc_per_node=spec.nproc,
        run_id=spec.run_id,
        rdzv_backend=_BACKEND,
        max_restarts=0,
        monitor_interval=0.03,
        start_method="fork",
        local_addr=spec.address,
        logs_specs=DefaultLogsSpecs(log_dir=spec.log_dir, redirects=Std.ALL),
        # Without any it asks CUDA for the number of GPUs, and in forks of a process that has, CUDA does not work.
        numa_options=NumaOptions(AffinityMode.NODE),
    )
    config.numa_options = None  # which is torch's own default
    try:
        elastic_launch(config, run_script)(spec.script, *spec.args)
    except ChildFailedError as error:
        return [
            WorkerFailure(local_rank=f.local_rank, exit_code=_shell_code(f.exitcode), pid=f.pid)
            for f in error.failures.values()
        ]
    return []


def end_leftovers(*_: Any) -> None:
    """End what a worker that has ended left of itself: what it forked, and what executes no other program.

    torch's launcher sees the end of a worker by that of a pipe, whose other end such a process has inherited; it would
    wait for as long as the process lives. Called when a child ends.
    """
    if sys.platform != "linux":
        return
    for worker in list(multiprocessing.process._children):  # type: ignore[attr-defined]  # active_children() reaps
        if worker.pid and _has_ended(worker.pid):
            with contextlib.suppress(OSError):
                end_holders(worker.sentinel)


def _has_ended(pid: int) -> bool:
    """Leaves it for torch to reap."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def _static_rendezvous(spec: LaunchSpec, listening: int | None) -> Any:
    """torchrun's static rendezvous on a socket that listens already: nobody can take the port or come too early."""
    from torch.distributed import PrefixStore, TCPStore
    from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
    from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

    class ListeningRendezvous(StaticTCPRendezvous):
        def get_backend(self) -> str:
            return _BACKEND

        def next_rendezvous(self) -> RendezvousInfo:
            store = TCPStore(
                self.master_addr,
                self.master_port,
                self.world_size,
                is_master=listening is not None,
                timeout=self.timeout,
                wait_for_workers=False,
                master_listen_fd=listening,
            )
            self._store = store
            where = RendezvousStoreInfo(self.master_addr, self.master_port)
            return RendezvousInfo(PrefixStore(self.run_id, store), self.rank, self.world_size, where)

    return ListeningRendezvous(
        spec.master_address, spec.master_port, spec.rank, spec.nodes, spec.run_id, timeout=_RENDEZVOUS_S
    )


_RENDEZVOUS_S = 300
"""For all nodes to have come. Whoever stays away for long is lost, and the next round ends this one."""


def run_script(script: str, *args: str) -> None:
    """A worker's life: ``python script args`` in a process forked from a warm interpreter."""
    from torch.distributed import distributed_c10d

    _be_a_fresh_process()
    die_with_parent()
    gloo_exit.keep_process_groups(distributed_c10d)
    stack_signal.install()
    sys.argv = [script, *args]
    sys.path[0] = str(Path(script).parent)
    if threads := os.environ.get("OMP_NUM_THREADS"):
        import torch

        torch.set_num_threads(int(threads))
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as exit_:
        if exit_.code is None:
            return  # torch's launcher waits for ever for a worker that leaves so; with code 0 it does not
        if not isinstance(exit_.code, int):
            print(exit_.code, file=sys.stderr)
            raise SystemExit(1) from None
        raise
    except Fenced as error:  # nothing in the script is wrong
        print(f"gpuctl: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    except BaseException as error:  # noqa: BLE001 - what Python itself does with an exception that nobody caught
        _print_as_python_would(error, script)
        lost = isinstance(error, GpuctlError) and error.exit_code == CHECKPOINT_LOST
        raise SystemExit(CHECKPOINT_LOST if lost else 1) from None
    finally:
        # multiprocessing leaves without the exit functions; a script that registered some expects them.
        atexit._run_exitfuncs()
        with contextlib.suppress(ValueError):
            sys.stdout.flush()


def die_with_parent() -> None:
    """End this process when the one that forked it ends (Linux), so that a dead agent leaves no workers behind."""
    if sys.platform != "linux":
        return
    import ctypes

    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)


def _be_a_fresh_process() -> None:
    """Undo what the launcher set up for itself."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    atexit._clear()
    _have_one_output()
    linecache.clearcache()


def _have_one_output() -> None:
    """stderr goes where stdout does: of two files nobody could tell what was written first. It marks each line, so that
    those who read both streams in one can still tell them apart."""
    sys.stderr.flush()
    os.dup2(1, 2)
    raw = io.BufferedWriter(LogFile(2, STDERR_MARK))
    sys.stderr = io.TextIOWrapper(raw, "utf-8", "backslashreplace", line_buffering=True)
    sys.stdout = out = to_log(sys.stdout, LogFile(1))
    out.reconfigure(line_buffering=True)
    # Ours are as good as those that the process began with.
    sys.__stdout__, sys.__stderr__ = out, sys.stderr  # type: ignore[misc]


def _print_as_python_would(error: BaseException, script: str) -> None:
    """The traceback from the script's first line on, without the frames that started it."""
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename != script:
        frame = frame.tb_next
    traceback.print_exception(error.with_traceback(frame or error.__traceback__))


def _shell_code(exit_code: int) -> int:
    return 128 - exit_code if exit_code < 0 else exit_code


def main(spec: int, result: int, listening: int | None = None) -> None:
    """The launch of a new interpreter, which got all else from the process that became it: environment, session, log.

    Args:
        spec: file descriptor of a file with the ``LaunchSpec``.
        result: that of the pipe to write the failures to.
        listening: as in ``launch``.
    """
    for fd in (spec, result, listening):
        if fd is not None:
            os.set_inheritable(fd, False)
    with os.fdopen(spec, "rb") as file:
        read = msgspec.json.decode(file.read(), type=LaunchSpec)
    os.write(result, msgspec.json.encode({"failures": launch(read, listening)}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
