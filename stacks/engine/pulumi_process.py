"""Pulumi's CLI as a process: who ends it, and what becomes of it when gpuctl ends first.

The Automation API's own way of running it shares gpuctl's terminal and gives it pipes. A closed terminal then ends the
CLI in the middle of a request, and the death of gpuctl breaks its pipes, which does the same: the plug-in goes on, and
what it makes is in no state. Here the CLI has a session of its own and writes to files, so only ``interrupt`` ends it,
and if gpuctl is killed, it finishes what it is at and writes that down.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import psutil
from pulumi.automation import CommandResult, PulumiCommand
from pulumi.automation.errors import create_command_error

STACK = "GPUCTL_STACK"
"""In the environment of the CLI and of its plug-ins: which stack of this machine's they work on."""
_PLUGIN = "pulumi-resource-"
"""How the programs of all resource plug-ins are called."""


class OwnSession(PulumiCommand):
    """Runs the program of ``found`` in a session of its own. One verb at a time."""

    def __init__(self, found: PulumiCommand) -> None:
        self.command = found.command
        self.version = found.version
        self._running: subprocess.Popen[bytes] | None = None
        self._interrupts = 0
        self._starting = threading.Lock()

    @contextlib.contextmanager
    def one_verb(self) -> Iterator[None]:
        """Context of what the Automation API does in several runs: once interrupted, no further run of it begins."""
        self._interrupts = 0
        try:
            yield
        finally:
            self._interrupts = 0

    def run(
        self,
        args: list[str],
        cwd: str,
        additional_env: Mapping[str, str],
        on_output: Callable[[str], Any] | None = None,
        on_error: Callable[[str], Any] | None = None,
    ) -> CommandResult:
        """Run the CLI to its end.

        Args:
            args: of the CLI, without its own name.
            cwd: where it runs.
            additional_env: variables besides those of this process, whose values give way.
            on_output: is told each line of its standard output, all of them at the end.
            on_error: is told each line of its error stream, all of them at the end.

        Raises ``CommandError`` if the CLI fails, or if the verb was interrupted before.
        """
        env = {**os.environ, **additional_env, "PULUMI_AUTOMATION_API": "true"}
        if Path(self.command).is_absolute():  # its own plug-ins, which lie beside it, go before those on PATH
            env["PATH"] = f"{Path(self.command).parent}{os.pathsep}{env.get('PATH', os.defpath)}"
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            with self._starting:  # an interrupt finds either no process, which then never begins, or this one
                if self._interrupts:
                    raise create_command_error(CommandResult("", "error: update cancelled", -signal.SIGINT))
                process = self._running = subprocess.Popen(
                    [self.command, "--non-interactive", *args],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    cwd=cwd,
                    env=env,
                    start_new_session=True,
                )
            try:
                with process:
                    code = process.wait()
            finally:
                self._running = None
            result = CommandResult(_read(out, on_output), _read(err, on_error), code)
        if code != 0:
            raise create_command_error(result)
        return result

    def interrupt(self) -> None:
        """Interrupt as Ctrl-C does: the first has the CLI finish what it is at, the second ends it, a third kills all
        of it. Between two runs of a verb, the next one does not begin."""
        with self._starting:
            self._interrupts += 1
            process = self._running
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            if self._interrupts < 3:
                process.send_signal(signal.SIGINT)
            else:
                os.killpg(process.pid, signal.SIGKILL)


def orphaned_plugins(stack: str) -> list[psutil.Process]:
    """Plug-ins of an engine that worked on ``stack`` (``STACK``) and has ended. They go on with what they were asked
    for."""
    return [process for process in psutil.process_iter() if _is_orphan(process, stack)]


def orphaned_engine(pid: int, stack: str) -> psutil.Process | None:
    """The engine with this pid, if it works on ``stack`` and the gpuctl that began it has ended: it goes on to its
    end."""
    try:
        engine = psutil.Process(pid)
        parent = engine.parent()
        if engine.environ().get(STACK) != stack or (parent and _is_gpuctl(parent)):
            return None
    except psutil.Error:
        return None
    return engine


def ends_within(process: psutil.Process, seconds: float) -> bool:
    """Wait for the end of a process that is no child of this one. A zombie has ended."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.1)
    return False


def _is_gpuctl(process: psutil.Process) -> bool:
    """And not a shell that was told to run it, which in a container takes in orphans."""
    return any(Path(word).name == "gpuctl" or word.startswith("gpuctl.") for word in process.cmdline())


def _is_orphan(process: psutil.Process, stack: str) -> bool:
    try:
        if process.uids().real != os.getuid() or process.status() == psutil.STATUS_ZOMBIE:
            return False
        if not any(Path(word).name.startswith(_PLUGIN) for word in process.cmdline()[:2]):
            return False
        if process.environ().get(STACK) != stack:
            return False
        parent = process.parent()
        return parent is None or parent.pid == 1 or not _is_engine(parent)
    except psutil.Error:
        return False


def _is_engine(process: psutil.Process) -> bool:
    return any(Path(word).name.startswith("pulumi") for word in [process.name(), *process.cmdline()])


def _read(file: IO[bytes], tell: Callable[[str], Any] | None) -> str:
    file.seek(0)
    text = file.read().decode(errors="replace")
    if tell:
        for line in text.splitlines():
            tell(line)
    return text.rstrip("\n")
