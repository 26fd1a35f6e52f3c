"""A node's warm interpreter: it has imported torch, and what the job's script imports, before a round begins.

It never runs a job's code itself: for each round it forks a launcher (``launch``), which forks the workers. So a round
costs forks, not imports. It must never create a CUDA context, which a fork would not survive.

The agent talks to it over a socket pair, one JSON message each way at a time:

- in: ``{"do": "preload", "names": […]}``, ``{"do": "launch", "spec": {…}, "listening": true}`` (and then that socket's
  file descriptor)
- out: ``{"event": "ready"}``, ``{"event": "preloaded", "failed": […]}``, ``{"event": "launched", "pid": …}``,
  ``{"event": "exited", "pid": …, "failures": […]}``, or with ``"error"`` where the launcher itself failed,
  or with neither where it was killed

It ends when the agent does, and its launchers and workers with it.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import sys
import traceback
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

from gpuctl.trainers.imports import preload
from gpuctl.trainers.launch import LaunchSpec, die_with_parent, launch

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


def main(fd: int) -> None:
    """Serve the agent on the other end of ``fd`` until it goes away."""
    die_with_parent()
    agent = Connection(fd)
    preload(_EVERY_SCRIPT)
    if "torch" not in sys.modules:
        agent.send_bytes(_message(event="unable", why="torch is not installed here"))
        return
    agent.send_bytes(_message(event="ready"))
    _Server(agent).serve()


class _Server:
    def __init__(self, agent: Connection) -> None:
        self._agent = agent
        self._results: dict[int, int] = {}
        """Launcher's pid to the pipe its result comes through."""
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
            self._agent.send_bytes(_message(event="preloaded", failed=preload(message["names"])))
        elif message["do"] == "launch":
            listening = reduction.recv_handle(self._agent) if message["listening"] else None
            pid = self._fork(msgspec.convert(message["spec"], LaunchSpec), listening)
            if listening is not None:
                os.close(listening)
            self._agent.send_bytes(_message(event="launched", pid=pid))
        return True

    def _fork(self, spec: LaunchSpec, listening: int | None) -> int:
        read, write = os.pipe()
        pid = os.fork()
        if pid:
            os.close(write)
            self._results[pid] = read
            return pid
        status = 1
        try:
            os.close(read)
            self._agent.close()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            status = _launcher(spec, listening, write)
        except BaseException as error:  # noqa: BLE001 - the process ends here, and should say why
            os.write(write, _message(error=f"{type(error).__name__}: {error}"))
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)

    def _reap(self) -> None:
        while self._results:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            pipe_end = self._results.pop(pid, None)
            if pipe_end is None:
                continue
            _kill_group(pid)  # workers that outlived their launcher, and whatever they started
            with os.fdopen(pipe_end, "rb") as pipe:
                data = pipe.read()
            result = msgspec.json.decode(data) if data else {}
            self._agent.send_bytes(_message(event="exited", pid=pid, **result))

    def _kill_all(self) -> None:
        for pid in self._results:
            _kill_group(pid)


def _launcher(spec: LaunchSpec, listening: int | None, result: int) -> int:
    """The forked process: a session of its own, so that everything it starts can be ended together."""
    os.setsid()
    die_with_parent()
    Path(spec.log_dir).mkdir(parents=True, exist_ok=True)
    log = os.open(Path(spec.log_dir) / "launcher.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.clear()
    os.environ.update(spec.env)
    os.chdir(spec.cwd)
    os.write(result, _message(failures=launch(spec, listening)))
    return 0


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def _message(**content: Any) -> bytes:
    return msgspec.json.encode(content)


if __name__ == "__main__":
    main(int(sys.argv[1]))
