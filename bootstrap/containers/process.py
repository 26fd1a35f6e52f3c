"""One round's container, seen from the agent: start it, tell it what to run, hear how that ended, kill it.

``trainers.launchers.container_entry`` is the other end of the conversation, and describes it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from gpuctl.bootstrap.launch.interpreter import Launched, LauncherExit, OnExit
from gpuctl.trainers.launchers.container_entry import SOCKET
from gpuctl.trainers.launchers.descendants import children_of
from gpuctl.trainers.launchers.torchrun import WorkerFailure

_LOOK_S = 0.1
_END_S = 15.0
"""For the runtime to see that a container has ended, or that it cannot begin, before it is asked to remove it."""
_KILLED = 137
_PORT_GONE = ("EADDRINUSE", "ddress already in use")


class ContainerCommand(msgspec.Struct, frozen=True, kw_only=True):
    """The command to run inside a container."""

    args: list[str]
    """torchrun's; with another launcher, the script and its own."""
    launcher: str = ""
    """One that is not torchrun."""
    world: dict[str, Any] = {}
    """The round, for that one."""
    log_dir: str = ""
    env: dict[str, str]
    library_path: list[str]
    """Folders for the end of ``LD_LIBRARY_PATH``."""
    library: str
    fabric: str = ""
    """What NCCL must be able to use, or nothing runs."""


class ContainerRun(Launched):
    """A running container. ``pid`` is torchrun's as this machine numbers it, 0 until that runs.

    ``held`` keeps the port of the round's rendezvous free of others, and is closed in the end. ``on_exit`` is called
    once nothing of the container is left.
    """

    def __init__(
        self,
        command: Sequence[str],
        removal: Sequence[str],
        client_env: Mapping[str, str],
        folder: Path,
        order: ContainerCommand,
        held: socket.socket | None,
        on_exit: OnExit,
    ) -> None:
        """Raises ``OSError`` if the command cannot be started."""
        super().__init__(0)
        self._removal = removal
        self._client_env = client_env
        self._order = order
        self._held = held
        self._on_exit = on_exit
        self._killed = threading.Event()
        self._lock = threading.Lock()
        self._first: int | None = None
        """A descriptor of the container's first process."""
        self._first_pid = 0
        self._said: dict[str, Any] = {}
        self._log = folder / "container.log"
        self._listener = _listen(folder)
        try:
            with self._log.open("ab") as log:
                self._client = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=dict(client_env)
                )
        except OSError:
            self._listener.close()
            raise
        threading.Thread(target=self._attend, name="container", daemon=True).start()

    def workers(self) -> list[int]:
        return super().workers() if self.pid else []

    def kill(self) -> None:
        """End all its processes at once; one that is only being made ends when it finds nobody to ask."""
        self._killed.set()
        with self._lock:
            if self._first is not None:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._first, signal.SIGKILL)

    def _attend(self) -> None:
        # What a container says that is killed may end anywhere.
        with self._listener, contextlib.suppress(OSError, msgspec.DecodeError):
            inside = self._meet()
            if inside is not None:
                with inside:
                    self._converse(inside)
        self._see_it_end()
        with self._lock:
            if self._first is not None:
                os.close(self._first)
                self._first = None
        if self._held is not None:
            self._held.close()
        self._on_exit(self._exit())

    def _meet(self) -> socket.socket | None:
        """The connection of the container's first process; ``None`` if it will not come."""
        self._listener.settimeout(_LOOK_S)
        while not self._killed.is_set() and self._client.poll() is None:
            try:
                inside, _ = self._listener.accept()
            except TimeoutError:
                continue
            pid, _, _ = struct.unpack("3i", inside.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            self._first_pid = pid
            try:
                with self._lock:
                    self._first = os.pidfd_open(pid)
            except ProcessLookupError:
                return None
            except OSError as error:  # before Linux 5.3
                self._said["error"] = f"this kernel cannot hold on to a process: {error}"
                return None
            return inside
        return None

    def _converse(self, inside: socket.socket) -> None:
        """Ends when all processes of the container have, or when it is killed."""
        if self._killed.is_set():
            return
        inside.settimeout(None)
        inside.sendall(msgspec.json.encode(self._order) + b"\n")
        with inside.makefile("rb") as lines:
            for line in lines:
                self._said |= msgspec.json.decode(line)
                children = children_of(self._first_pid)
                if children and not self.pid:
                    self.pid = children[0]  # the oldest is torchrun, the others are adopted

    def _see_it_end(self) -> None:
        try:
            self._client.wait(_END_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                subprocess.run(
                    self._removal,
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    env=dict(self._client_env),
                    timeout=_END_S,
                )
            self._client.kill()
            self._client.wait()

    def _exit(self) -> LauncherExit:
        if self._killed.is_set():
            return LauncherExit(killed=True)
        if "failures" in self._said:
            return LauncherExit(failures=msgspec.convert(self._said["failures"], tuple[WorkerFailure, ...]))
        error = self._said.get("error") or _last_line(self._log)
        if self._client.returncode in (_KILLED, -signal.SIGKILL) and "error" not in self._said:
            return LauncherExit(killed=True)
        if any(sign in error for sign in _PORT_GONE):
            return LauncherExit(killed=True)  # somebody took the master's port, for which the script cannot help
        return LauncherExit(error=error or f"the container ended with code {self._client.returncode}")


def _listen(folder: Path) -> socket.socket:
    """Through the folder's descriptor, since a socket's path may have 107 bytes and no more."""
    listener = socket.socket(socket.AF_UNIX)
    opened = os.open(folder, os.O_RDONLY)
    try:
        listener.bind(f"/proc/self/fd/{opened}/{SOCKET}")
        (folder / SOCKET).chmod(0o600)
        listener.listen(1)
    except OSError:
        listener.close()
        raise
    finally:
        os.close(opened)
    return listener


def _last_line(log: Path) -> str:
    try:
        lines = log.read_text(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1].removeprefix("Error: ") if lines else ""
