"""A port of a node, or of a program that is started there, forwarded to this machine until Ctrl-C."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from gpuctl.cli.render.terminal import out, say
from gpuctl.cli.session import node_access
from gpuctl.cluster.errors import GpuctlError
from gpuctl.stacks.ssh.commands import Command, SshShell
from gpuctl.stacks.ssh.hosts import Host

_PATIENCE_S = 60.0
_LOOK_S = 0.1
_LOCALHOST = "127.0.0.1"

Served = tuple[subprocess.Popen[bytes], int]
"""A program on a node, as the process here that lives as long as it does, and its port there."""


class PortForward:
    """A forwarded port.

    Args:
        nodes: the way to the cluster's nodes.
        host: the node.
        port: on the node, or what serves there, as a context in which it does.
        path: of the URL that is printed.
    """

    def __init__(
        self,
        nodes: node_access.NodeAccess,
        host: Host,
        port: int | Callable[[], AbstractContextManager[Served]],
        path: str = "",
    ) -> None:
        self._nodes = nodes
        self._host = host
        self._port = port
        self._path = path
        self._told: int | None = None
        """The port here that was printed."""

    def until_ctrl_c(self) -> None:
        """Raises ``GpuctlError`` when the connection has ended, where that is not what its tunnel does after a time."""
        try:
            while True:
                with ExitStack() as stack:
                    processes, local = self._open(stack)
                    self._tell(local)
                    end = self._end_of_one(processes)
                if not self._host.tunnel:
                    raise end
                say(f"the tunnel to {self._host.node} closed; opening another")
                if isinstance(self._nodes.shell, SshShell):
                    self._nodes.shell.forget(self._host)
        except KeyboardInterrupt:
            if self._told is None:
                raise

    def _open(self, stack: ExitStack) -> tuple[list[subprocess.Popen[bytes]], int]:
        """Start what carries the port; returns the processes, each of which it needs, and the port here."""
        processes: list[subprocess.Popen[bytes]] = []
        port = self._port
        if not isinstance(port, int):
            program, port = stack.enter_context(port())
            processes.append(program)
        if isinstance(self._nodes.shell, SshShell):
            carrier, port = stack.enter_context(_forwarded(self._nodes.shell, self._host, port, self._told or port))
            processes.append(carrier)
        return processes, port

    def _tell(self, local: int) -> None:
        if local != self._told:
            out(f"http://{_LOCALHOST}:{local}{self._path}")
        say("Ctrl-C to stop" if self._told is None else "reconnected")
        self._told = local
        sys.stdout.flush()

    def _end_of_one(self, processes: list[subprocess.Popen[bytes]]) -> GpuctlError:
        while True:
            for process in processes:
                if process.poll() is not None:
                    trouble = self._nodes.shell.trouble(self._host, node_access.shells(process.returncode))
                    return trouble or GpuctlError(f"the connection to {self._host.node} was lost", "run it again")
            time.sleep(_LOOK_S)


@contextmanager
def _forwarded(shell: SshShell, host: Host, port: int, wanted: int) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The ssh that carries it, and the port here: ``wanted`` if that is free."""
    local = _free_port(wanted)
    quiet = {"stdin": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}  # what there is to say is in ssh's log
    with node_access.started(shell.forward(host, local, port), **quiet) as process:
        deadline = time.monotonic() + _PATIENCE_S
        while not _answers(local):
            if process.poll() is not None:
                code = node_access.shells(process.returncode)
                raise shell.trouble(host, code) or GpuctlError(f"ssh to {host.node} has ended ({code})", "try again")
            if time.monotonic() > deadline:
                raise GpuctlError(f"{host.node} could not be reached within {_PATIENCE_S:g} s", "see `gpuctl status`")
            time.sleep(0.02)
        yield process, local


@contextmanager
def served(
    nodes: node_access.NodeAccess, host: Host, command: Command, what: str, hint: str, first: bytes = b""
) -> Iterator[Served]:
    """What ``command`` serves on the node, which prints ``port N`` once it does, and ends with its standard input.

    Args:
        nodes: the way to the cluster's nodes.
        host: the node.
        command: see ``SshShell.python``.
        what: it is, for the message if it does not start.
        hint: what to do then.
        first: a line that it is told first.
    """
    with node_access.started(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(first)
            process.stdin.flush()
        for line in process.stdout:
            if found := re.match(rb"port (\d+)", line):
                yield process, int(found[1])
                return
        code = node_access.shells(process.wait())
        raise nodes.shell.trouble(host, code) or GpuctlError(f"{what} did not start on {host.node}", hint)


def _free_port(wanted: int) -> int:
    """``wanted`` if nobody has it, else one that the kernel chooses."""
    for port in (wanted, 0):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((_LOCALHOST, port))
            chosen: int = probe.getsockname()[1]
            return chosen
    raise GpuctlError("no free port on this machine", "stop a program that listens")


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((_LOCALHOST, port)) == 0
