"""A node's warm interpreter: it has imported torch, and what the job's script imports, before a round begins.

It never runs a job's code itself: for each round it forks a launcher (``torchrun``), which forks the workers. So a
round costs forks, not imports. It must never begin CUDA (``cuInit``): in the forks of a process that has, CUDA does
not work (pytorch.org, "Poison fork in multiprocessing"). Some modules do so when they are imported. If one has, each
fork becomes a new interpreter first, as it does for jobs that need one: the agent is told, and starts another such
process, which leaves that job's imports to the workers.

The agent talks to it over a socket pair, one JSON message each way at a time:

- in: ``{"do": "preload", "names": […]}``, ``{"do": "launch", "spec": {…}, "listening": true, "fresh": false}`` (and
  then that socket's file descriptor)
- out: ``{"event": "ready"}`` or ``{"event": "unable", "why": …}`` (then every launch is a fresh one),
  ``{"event": "preloaded", "failed": […], "spoiled": false}``, ``{"event": "launched", "pid": …}``,
  ``{"event": "exited", "pid": …, "failures": […]}``, or with ``"error"`` where the launcher itself failed,
  or with neither where it was killed

It ends when the agent does, and its launchers and workers with it.
"""

from __future__ import annotations

import ctypes
import os
import selectors
import signal
import socket
import sys
import tempfile
import traceback
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from gpuctl.trainers.launchers import process_group
from gpuctl.trainers.launchers.adapter import named
from gpuctl.trainers.launchers.descendants import adopt_orphans, children_of, end_orphans, enter
from gpuctl.trainers.launchers.preload import preload
from gpuctl.trainers.launchers.torchrun import TORCHRUN, LaunchSpec, WorkerFailure, die_with_parent, launch

_EVERY_SCRIPT = (
    "torch",
    "torch._dynamo",  # the first step of any optimizer imports it: 1.8 s
    "torch.distributed.launcher.api",
    "torch.distributed.elastic.rendezvous.static_tcp_rendezvous",
    "torch.nn.parallel",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.algorithms.join",
    "torch.utils.data.distributed",
    "gpuctl.Trainer",
    "gpuctl.Checkpointer",
)
_NOT_BEGUN = 3
"""``CUDA_ERROR_NOT_INITIALIZED``."""


def main(fd: int) -> None:
    """Serve the agent on the other end of ``fd`` until it goes away."""
    die_with_parent()
    adopt_orphans()
    agent = Connection(fd)
    # Else torch.cuda.is_available(), which modules ask when they are imported, begins CUDA. Workers have the job's own.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    preload(_EVERY_SCRIPT)
    if "torch" not in sys.modules:
        agent.send_bytes(_message(event="unable", why="torch is not installed here"))
    elif cuda_has_begun():
        agent.send_bytes(_message(event="unable", why="importing torch initializes CUDA here"))
    else:
        agent.send_bytes(_message(event="ready"))
    _Server(agent).serve()


def cuda_has_begun() -> bool:
    """Whether this process has called ``cuInit``; torch itself knows only of its own contexts."""
    try:
        driver = ctypes.CDLL("libcuda.so.1", os.RTLD_NOLOAD)
    except OSError:
        return False
    return bool(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != _NOT_BEGUN)


class _Server:
    def __init__(self, agent: Connection) -> None:
        self._agent = agent
        self._results: dict[int, tuple[int, Path]] = {}
        """Launcher's pid to the pipe its result comes through, and its log."""
        self._own: set[int] = set()
        """Children that are no job's: a preloaded module may have started some."""
        self._child_ended, waker = socket.socketpair()
        self._child_ended.setblocking(False)
        waker.setblocking(False)
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        self._waker = waker
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> None:
        selector = selectors.DefaultSelector()
        selector.register(self._agent, selectors.EVENT_READ)
        selector.register(self._child_ended, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is self._child_ended:
                    self._child_ended.recv(4096)
                    self._reap()
                elif not self._obey():
                    self._kill_all()
                    return

    def _obey(self) -> bool:
        try:
            message = msgspec.json.decode(self._agent.recv_bytes())
        except (EOFError, OSError):
            return False
        if message["do"] == "preload":
            failed = preload(message["names"])
            if spoiled := cuda_has_begun():
                print(f"an import initializes CUDA, so each worker imports for itself: {message['names']}", flush=True)
            self._agent.send_bytes(_message(event="preloaded", failed=failed, spoiled=spoiled))
        elif message["do"] == "launch":
            listening = reduction.recv_handle(self._agent) if message["listening"] else None
            spec = msgspec.convert(message["spec"], LaunchSpec)
            pid = self._fork(spec, listening, fresh=message["fresh"] or cuda_has_begun())
            if listening is not None:
                os.close(listening)
            self._agent.send_bytes(_message(event="launched", pid=pid))
        return True

    def _fork(self, spec: LaunchSpec, listening: int | None, *, fresh: bool) -> int:
        if not self._results:
            self._own = set(children_of(os.getpid()))
        read, write = os.pipe()
        pid = os.fork()
        if pid:
            os.close(write)
            self._results[pid] = read, _log_of(spec)
            return pid
        status = 1
        try:
            os.close(read)
            self._agent.close()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            status = _launcher(spec, listening, write, fresh=fresh)
        except process_group.Unable as error:
            os.write(write, _message(error=str(error)))
        except BaseException as error:  # noqa: BLE001 - the process ends here, and should say why
            os.write(write, _message(error=f"{type(error).__name__}: {error}"))
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)

    def _reap(self) -> None:
        while self._results:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid not in self._results:
                continue
            pipe_end, log = self._results.pop(pid)
            _kill_group(pid)  # workers that outlived their launcher, and what they started in its session
            end_orphans(self._own | self._results.keys())  # and outside of it
            with os.fdopen(pipe_end, "rb") as pipe:
                data = pipe.read()
            result = msgspec.json.decode(data) if data else {}
            if not data and os.waitstatus_to_exitcode(status) > 0:
                result = {"error": _last_lines(log)}
            self._agent.send_bytes(_message(event="exited", pid=pid, **result))

    def _kill_all(self) -> None:
        for pid in self._results:
            _kill_group(pid)
        end_orphans(self._own)


def _launcher(spec: LaunchSpec, listening: int | None, result: int, *, fresh: bool) -> int:
    """The forked process: a session of its own, so that everything it starts can be ended together."""
    os.setsid()
    die_with_parent()
    enter(spec.cgroup)
    Path(spec.log_dir).mkdir(parents=True, exist_ok=True)
    log = os.open(_log_of(spec), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(spec.cwd)
    if spec.launcher != TORCHRUN:
        os.write(result, _message(failures=_in_group(spec, listening)))
        return 0
    if fresh:
        _become_new(spec, listening, result)
    os.environ.clear()
    os.environ.update(spec.env)
    os.write(result, _message(failures=launch(spec, listening)))
    return 0


def _in_group(spec: LaunchSpec, listening: int | None) -> list[WorkerFailure]:
    """The workers of another launcher: programs, which begin anew."""
    held = None if listening is None else socket.socket(fileno=listening)
    ended = process_group.run(
        named(spec.launcher), spec.world, [spec.script, *spec.args], spec.env, Path(spec.log_dir), held
    )
    return [WorkerFailure(local_rank=one.local_rank, exit_code=one.exit_code, pid=one.pid) for one in ended]


def _become_new(spec: LaunchSpec, listening: int | None, result: int) -> NoReturn:
    """This process becomes an interpreter that was started with the job's variables: see ``torchrun.main``."""
    with tempfile.TemporaryFile() as file:  # of no name: what the job's variables say is nobody else's to read
        file.write(msgspec.json.encode(spec))
        file.seek(0)
        fds = [file.fileno(), result, *([] if listening is None else [listening])]
        for fd in fds:
            os.set_inheritable(fd, True)
        command = [sys.executable, "-m", "gpuctl.trainers.launchers.torchrun", *map(str, fds)]
        os.execve(sys.executable, command, spec.env)


def _log_of(spec: LaunchSpec) -> Path:
    return Path(spec.log_dir) / "launcher.log"


def _last_lines(log: Path) -> str:
    try:
        return " | ".join(log.read_text(errors="replace").strip().splitlines()[-3:])
    except OSError:
        return ""


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def _message(**content: Any) -> bytes:
    return msgspec.json.encode(content)


if __name__ == "__main__":
    main(int(sys.argv[1]))
