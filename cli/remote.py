"""What the verbs that log in share: the nodes of a cluster, the way to them, and running a command there."""

from __future__ import annotations

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

from gpuctl.cli.access import Access
from gpuctl.cli.verbs import Interrupted, TextCommand
from gpuctl.cluster import jobs
from gpuctl.cluster.bucket import Bucket
from gpuctl.cluster.errors import GpuctlError
from gpuctl.stacks import ssh_config
from gpuctl.stacks.hosts import Host, chosen, read_hosts
from gpuctl.stacks.shell import Command, Here, Remote

_WORDS = "gpuctl.words"
_PATIENCE_S = 5.0


class WithCommand(TextCommand):
    """A verb whose line ends with ``-- CMD``: what stands after the first ``--`` reaches it as it is."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        before, dashes, after = _split(args)
        ctx.meta[_WORDS] = after if dashes else None
        parsed: list[str] = super().parse_args(ctx, before)
        return parsed

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- CMD ...]"]


def words_of(ctx: typer.Context) -> list[str] | None:
    """What stood after ``--``; ``None`` if there was no ``--``."""
    found: list[str] | None = ctx.meta[_WORDS]
    return found


@dataclass(frozen=True, slots=True)
class Nodes:
    """Of one cluster."""

    cluster: str
    store: Bucket
    hosts: list[Host]
    shell: Here | Remote

    def chosen(self, name: str | None) -> Host:
        """See ``hosts.chosen``."""
        return chosen(self.hosts, name)


@contextmanager
def reached(access: Access) -> Iterator[Nodes]:
    """The cluster's nodes as they are now; ssh's configuration of them is made anew on the way."""
    spec = jobs.cluster_spec(access.store)
    hosts = read_hosts(access.store)
    if spec.provider == "local":
        from gpuctl.stacks import local

        yield Nodes(spec.name, access.store, hosts, Here(local.places(spec.name)))
        return
    config = ssh_config.write(spec.name, hosts)
    with tempfile.TemporaryDirectory(prefix="gpuctl-ssh-") as logs:
        way_in = any(host.is_public for host in hosts)
        yield Nodes(spec.name, access.store, hosts, Remote(spec.name, config, Path(logs), way_in=way_in))


def run(nodes: Nodes, host: Host, command: Command) -> int:
    """Run ``command``, of ``host``, on this terminal; returns its exit code, as the shell has it.

    Raises ``GpuctlError`` if it could not be reached.
    """
    with started(command) as process:
        try:
            code = shells(process.wait())
        except KeyboardInterrupt as error:
            raise Interrupted("interrupted") from error
    if trouble := nodes.shell.trouble(host, code):
        raise trouble
    return code


@contextmanager
def started(command: Command, **streams: Any) -> Iterator[subprocess.Popen[bytes]]:
    """``command`` as a process that ends at the latest with this block, SIGTERM included."""
    with heeding_sigterm():
        try:
            process = subprocess.Popen(command.argv, cwd=command.cwd, env=command.env, **streams)
        except FileNotFoundError as error:
            raise GpuctlError(f"{command.argv[0]} is not on this machine", "install it") from error
        try:
            yield process
        finally:
            end(process)


@contextmanager
def heeding_sigterm() -> Iterator[None]:
    """Within, SIGTERM is a ``SystemExit``, so that what was started is ended first."""
    before = signal.signal(signal.SIGTERM, _on_sigterm)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def end(process: subprocess.Popen[bytes]) -> None:
    """Politely, then not."""
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


def _split(args: list[str]) -> tuple[list[str], bool, list[str]]:
    if "--" not in args:
        return args, False, []
    at = args.index("--")
    return args[:at], True, args[at + 1 :]


def _on_sigterm(_number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + signal.SIGTERM)
