"""The agent's side of the warm interpreter: start it, keep it, launch rounds from it. The other side is
``trainers.launchers.warm_interpreter``."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import Pipe, reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import msgspec

from gpuctl.trainers.launchers.descendants import children_of
from gpuctl.trainers.launchers.torchrun import LaunchSpec, WorkerFailure


@dataclass(frozen=True, slots=True)
class LauncherExit:
    """How a launcher exited: well, unless one of these says otherwise."""

    failures: tuple[WorkerFailure, ...] = ()
    """The workers that failed."""
    error: str = ""
    """Why the launcher itself failed."""
    killed: bool = False
    """By a signal, which no script does to it."""


OnExit = Callable[[LauncherExit], None]

_STOP_S = 10


class Launched:
    """A launcher that was started: the head of a process group with all its workers in it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def workers(self) -> list[int]:
        """The pids of its worker processes."""
        return children_of(self.pid)

    def kill(self) -> None:
        """End it, its workers, and what they started in its session, at once; the rest ends with them."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)  # in the moment before it heads a group of its own


class Interpreter:
    """A Python process with torch imported, from which launchers are forked. Thread-safe. ``on_change`` is called when
    it became ready, failed, or finished preloading."""

    def __init__(
        self, env: Mapping[str, str], log: Path, on_change: Callable[[], None], python: str | None = None
    ) -> None:
        """``python``: which to start; ``None``: the one that runs this."""
        self.state: Literal["warming", "ready", "spoiled", "unable", "dead"] = "warming"
        """Spoiled, or unable: what is forked from it begins anew (see ``trainers.launchers.warm_interpreter``)."""
        self._env = dict(env)
        self._log = log
        self._python = python or sys.executable
        self._on_change = on_change
        self._talking = threading.Lock()
        """One request at a time; the thread that listens never takes it."""
        self._lock = threading.Lock()
        self._replies: queue.Queue[dict[str, Any]] = queue.Queue()
        self._exits: dict[int, OnExit] = {}
        self._unclaimed: dict[int, LauncherExit] = {}
        """Of launchers that exited before ``launch`` had their pid."""
        self._preloading = 0
        # A child asks to die with its parent, and to the kernel that is the thread that forked it: one that stays.
        self._spawner = ThreadPoolExecutor(1, thread_name_prefix="spawner")
        self._agent: Connection
        self._process: subprocess.Popen[bytes]
        self._start()

    @property
    def is_ready(self) -> bool:
        """Warm, with nothing left to preload. One that cannot be warm is as ready as it will be."""
        return self.state in ("unable", "spoiled") or (self.state == "ready" and self._preloading == 0)

    @property
    def is_idle(self) -> bool:
        """Whether nothing that was launched from it is left."""
        with self._lock:
            return not self._exits

    def keep(self) -> None:
        """Start it again if it died (a preloaded module may have crashed it), or is spoiled and has no launcher."""
        if self.state not in ("dead", "spoiled") or not self._talking.acquire(blocking=False):
            return
        try:
            with self._lock:
                if self.state == "spoiled" and not self._exits:
                    self._process.kill()  # its pipe ends, and then it is dead
            self._start_if_dead()
        finally:
            self._talking.release()

    def preload(self, names: Iterable[str]) -> None:
        with self._talking:
            if self.state in ("warming", "ready") and (names := list(names)):
                self._preloading += 1
                self._send({"do": "preload", "names": names})

    def launch(self, spec: LaunchSpec, listening: socket.socket | None, *, fresh: bool, on_exit: OnExit) -> Launched:
        """Start the workers of a round. ``fresh``: in a new interpreter. ``on_exit`` is called from another thread.

        Raises ``OSError`` if nothing could be started.
        """
        with self._talking:
            self._start_if_dead()
            request = {"do": "launch", "spec": msgspec.to_builtins(spec), "fresh": fresh}
            self._send({**request, "listening": listening is not None})
            if listening is not None:
                reduction.send_handle(self._agent, listening.fileno(), self._process.pid)
            reply = self._replies.get()
            if "pid" not in reply:
                raise OSError("the warm interpreter died")
            pid: int = reply["pid"]
            with self._lock:
                if pid not in self._unclaimed:
                    self._exits[pid] = on_exit
                    return Launched(pid)
                exited = self._unclaimed.pop(pid)
        threading.Thread(target=on_exit, args=(exited,), daemon=True).start()
        return Launched(pid)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        self._listener.join(_STOP_S)  # it hears that; closed under it, what it reads from might be another file
        self._agent.close()
        self._spawner.shutdown(wait=False)

    # -- the process --------------------------------------------------------------------------------------------------

    def _start_if_dead(self) -> None:
        if self.state == "dead":
            self._start()

    def _start(self) -> None:
        ours, theirs = Pipe(duplex=True)
        self.state = "warming"
        self._preloading = 0
        self._agent = ours
        self._replies = queue.Queue()
        command = [self._python, "-m", "gpuctl.trainers.launchers.warm_interpreter", str(theirs.fileno())]
        with self._log.open("ab") as log:
            self._process = self._spawner.submit(
                subprocess.Popen,
                command,
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._env,
            ).result()
        theirs.close()
        self._listener = threading.Thread(target=self._listen, args=(ours,), name="interpreter", daemon=True)
        self._listener.start()

    def _send(self, message: dict[str, Any]) -> None:
        self._agent.send_bytes(msgspec.json.encode(message))

    def _listen(self, agent: Connection) -> None:
        try:
            while True:
                self._hear(msgspec.json.decode(agent.recv_bytes()))
        except (EOFError, OSError):
            with self._lock:
                exits, self._exits = self._exits, {}
            self._replies.put({"event": "died"})
            self.state = "dead"  # last: from now on there may be another one
            for on_exit in exits.values():
                on_exit(LauncherExit(killed=True))
        self._on_change()

    def _hear(self, message: dict[str, Any]) -> None:
        match message["event"]:
            case "ready":
                self.state = "ready"
                self._on_change()
            case "unable":
                self.state = "unable"
                self._on_change()
            case "preloaded":
                self._preloading -= 1
                if message["spoiled"]:
                    self.state = "spoiled"
                self._on_change()
            case "launched":
                self._replies.put(message)
            case "exited":
                exited = _exit_of(message)
                with self._lock:
                    on_exit = self._exits.pop(message["pid"], None)
                    if on_exit is None:
                        self._unclaimed[message["pid"]] = exited
                if on_exit:
                    on_exit(exited)


def _exit_of(told: Mapping[str, Any]) -> LauncherExit:
    """The exit that a launcher's last message tells of: ``failures`` or ``error``, or that it was killed."""
    if told.get("failures") is not None:
        return LauncherExit(failures=msgspec.convert(told["failures"], tuple[WorkerFailure, ...]))
    if "error" in told:
        return LauncherExit(error=told["error"] or "for no reason that it told")
    return LauncherExit(killed=True)
