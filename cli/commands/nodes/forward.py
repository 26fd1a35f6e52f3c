"""``gpuctl forward``: forwards a node's port, or TensorBoard, to this machine."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Annotated

import typer

from gpuctl.cli.render.terminal import out, say
from gpuctl.cli.session import node_access
from gpuctl.cli.session.open_cluster import reach
from gpuctl.cli.settings.options import Bucket, Cluster, text_option
from gpuctl.cluster import layout
from gpuctl.cluster.errors import BadInput, GpuctlError
from gpuctl.cluster.jobs import queue
from gpuctl.cluster.storage.bucket import Bucket as Store
from gpuctl.stacks.ssh.commands import LocalShell, SshShell
from gpuctl.stacks.ssh.hosts import Host

_PATIENCE_S = 60.0
_LOOK_S = 0.1
_LOCALHOST = "127.0.0.1"


def verb(
    what: Annotated[str, typer.Argument(metavar="PORT|tensorboard", help="Port on the node, or tensorboard.")],
    node: Annotated[
        str | None,
        text_option("--node", metavar="NODE", about="Node name, or index in rank order (default: 0, rank 0)."),
    ] = None,
    job: Annotated[
        str | None, text_option("--job", metavar="JOB", about="Job to show in TensorBoard (default: the newest).")
    ] = None,
    cluster: Cluster = None,
    bucket: Bucket = None,
) -> None:
    """Forward a node's port, or TensorBoard, to this machine.

    Prints the URL and stays until Ctrl-C. The port here is the same one if it is free. TensorBoard runs on the node,
    over all that the job has written so far and goes on writing. A tunnel of AWS ends after an hour at the latest, and
    is opened again for the same URL.
    """
    port = None if what == "tensorboard" else parse_port(what)
    if port is not None and job is not None:
        raise BadInput("--job applies to `forward tensorboard` only", "leave it out")
    with node_access.reached(reach(cluster, bucket)) as nodes:
        host = nodes.chosen(node)
        if port is not None and isinstance(nodes.shell, LocalShell):
            nodes.shell.place(host)
            say(f"{host.node} is on this machine: use port {port} directly")
            out(f"http://{host.address}:{port}")
            return
        whose = _job_with_events(nodes.store, job) if port is None else ""
        _Forward(nodes, host, port, whose).until_ctrl_c()


def _job_with_events(store: Store, job: str | None) -> str:
    """One that runs may have them on its nodes, as yet."""

    def has(name: str) -> bool:
        return queue.outcome(store, name) is None or bool(store.list(layout.tensorboard(name)))

    found = queue.find_with(store, job, has).job
    say(f"TensorBoard of {found}")
    return found


def parse_port(text: str) -> int:
    """Parse a port number. Raises ``BadInput``."""
    if not re.fullmatch(r"\d{1,5}", text, re.ASCII) or not 0 < int(text) < 65536:
        raise BadInput(f"{text!r} is not a port", "use one from 1 to 65535, or tensorboard")
    return int(text)


class _Forward:
    """A forwarded port: ``port`` on the node, or the TensorBoard of ``job`` if that is ``None``."""

    def __init__(self, nodes: node_access.NodeAccess, host: Host, port: int | None, job: str) -> None:
        self._nodes = nodes
        self._host = host
        self._port = port
        self._job = job
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
        if port is None:
            tensorboard, port = stack.enter_context(_tensorboard(self._nodes, self._host, self._job))
            processes.append(tensorboard)
        if isinstance(self._nodes.shell, SshShell):
            carrier, port = stack.enter_context(_forwarded(self._nodes.shell, self._host, port, self._told or port))
            processes.append(carrier)
        return processes, port

    def _tell(self, local: int) -> None:
        if local != self._told:
            out(f"http://{_LOCALHOST}:{local}")
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
def _tensorboard(nodes: node_access.NodeAccess, host: Host, job: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The process that lives as long as it does, and its port on the node."""
    command = nodes.shell.python(host, "gpuctl.bootstrap.tensorboard", [job])
    with node_access.started(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.match(rb"port (\d+)", line):
                yield process, int(found[1])
                return
        code = node_access.shells(process.wait())
        raise nodes.shell.trouble(host, code) or GpuctlError(
            f"TensorBoard did not start on {host.node}", "see above; is it installed there?"
        )


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
