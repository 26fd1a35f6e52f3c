"""Shared parts of the verbs that log in: the nodes of a cluster, the way to them, and running a command there."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import typer

from gpuctl.cli.session.open_cluster import OpenCluster
from gpuctl.cli.signals import Interrupted
from gpuctl.cluster.errors import GpuctlError
from gpuctl.cluster.jobs import queue
from gpuctl.cluster.storage.bucket import Bucket
from gpuctl.stacks.ssh import config as ssh_config
from gpuctl.stacks.ssh.commands import Command, LocalShell, SshShell
from gpuctl.stacks.ssh.hosts import Host, chosen, read_hosts

_PATIENCE_S = 5.0


@dataclass(frozen=True, slots=True)
class NodeAccess:
    """The way to the nodes of one cluster."""

    cluster: str
    store: Bucket
    hosts: list[Host]
    shell: LocalShell | SshShell

    def chosen(self, name: str | None) -> Host:
        """The nodes that are named; see ``hosts.chosen``."""
        return chosen(self.hosts, name)


@contextmanager
def reached(access: OpenCluster) -> Iterator[NodeAccess]:
    """The cluster's nodes as they are now; ssh's configuration of them is made anew on the way."""
    spec = queue.cluster_spec(access.store)
    hosts = read_hosts(access.store, spec)
    if spec.provider == "local":
        from gpuctl.stacks.providers import local_nodes

        yield NodeAccess(spec.name, access.store, hosts, LocalShell(local_nodes.places(spec.name)))
        return
    config = ssh_config.write(spec.name, hosts)
    with tempfile.TemporaryDirectory(prefix="gpuctl-ssh-") as logs:
        way_in = any(host.is_public for host in hosts)
        yield NodeAccess(spec.name, access.store, hosts, SshShell(spec.name, config, Path(logs), way_in=way_in))


def run(nodes: NodeAccess, host: Host, command: Command, first: bytes = b"") -> int:
    """Run ``command``, of ``host``, on this terminal; returns its exit code, as the shell has it.

    ``first``: what its standard input begins with; that then ends when this does, and has nothing more.

    Raises ``GpuctlError`` if it could not be reached.
    """
    with started(command, **({"stdin": subprocess.PIPE} if first else {})) as process:
        try:
            if process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.write(first)
                    process.stdin.flush()
            code = shells(process.wait())
        except KeyboardInterrupt as error:
            raise Interrupted("interrupted") from error
    if trouble := nodes.shell.trouble(host, code):
        raise trouble
    return code


@contextmanager
def started(command: Command, **streams: Any) -> Iterator[subprocess.Popen[bytes]]:
    """``command`` as a process that ends at the latest with this block, SIGTERM included."""
    with stop_on_sigterm():
        try:
            process = subprocess.Popen(command.argv, cwd=command.cwd, env=command.env, **streams)
        except FileNotFoundError as error:
            raise GpuctlError(f"{command.argv[0]} is not installed on this machine", "install it") from error
        try:
            yield process
        finally:
            end(process)


@contextmanager
def stop_on_sigterm() -> Iterator[None]:
    """Context in which SIGTERM raises ``SystemExit``, so that what was started is ended first."""
    before = signal.signal(signal.SIGTERM, _on_sigterm)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process: SIGTERM, then SIGKILL."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def has_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def shells(code: int) -> int:
    """An exit code as the shell has it: 128 + the number of the signal that ended a process."""
    return code if code >= 0 else 128 - code


def leave_with(code: int) -> None:
    """End the verb with the exit code of what it ran."""
    if code:
        raise typer.Exit(code)


def _on_sigterm(_number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + signal.SIGTERM)
