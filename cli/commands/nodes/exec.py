"""``gpuctl exec``: runs a command on one node or all."""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, TextIO

import typer

from gpuctl.cli.command_words import WithCommand, words_of
from gpuctl.cli.render.terminal import fail, say, styled
from gpuctl.cli.session import node_access
from gpuctl.cli.session.open_cluster import reach
from gpuctl.cli.settings.options import Bucket, Cluster
from gpuctl.cli.signals import Interrupted
from gpuctl.cluster.errors import BadInput, GpuctlError
from gpuctl.stacks.ssh import tunnels
from gpuctl.stacks.ssh.hosts import Host

COMMAND = WithCommand

_AT_ONCE = 64
"""Of nodes that are reached through tunnels fewer: see ``tunnels``."""
_UNREACHED = 255
_LOOK_S = 0.1
"""Seconds between looks whether a process has ended whose pipes somebody else holds open."""
_PIPE_BYTES = 1 << 20
"""More than a pipe holds."""
_COLOURS = ("cyan", "yellow", "green", "red")


def verb(
    ctx: typer.Context,
    node: Annotated[
        str | None, typer.Argument(metavar="NODE", help="Node name, or index in rank order (default: 0, rank 0).")
    ] = None,
    everywhere: Annotated[bool, typer.Option("--all", "-a", help="Run on all nodes at the same time.")] = False,
    cluster: Cluster = None,
    bucket: Bucket = None,
) -> None:
    """Run a command on one node or all.

    One word after `--` is a line for the node's shell, several are a program and its arguments. With --all each line
    begins with its node, and the exit code is that of the first node in rank order that failed (255: not reached).
    Ctrl-C ends the connections; a program that has no terminal there may go on until it prints.
    """
    words = words_of(ctx)
    if not words:
        raise BadInput("no command; give one after `--`", "for example: gpuctl exec --all -- nvidia-smi")
    if everywhere and node is not None:
        raise BadInput(f"--all and {node} exclude each other", "leave one of them out")
    with node_access.reached(reach(cluster, bucket)) as nodes:
        if not everywhere:
            host = nodes.chosen(node)
            command = nodes.shell.run(host, words, terminal=node_access.has_terminal())
            node_access.leave_with(node_access.run(nodes, host, command))
            return
        node_access.leave_with(_on_all(nodes, words))


def _on_all(nodes: node_access.NodeAccess, words: list[str]) -> int:
    hosts = [host for host in nodes.hosts if host.takes_part]
    for host in nodes.hosts:
        if not host.takes_part:
            say(f"{host.node}: skipped, it is not in the cluster")
    if not hosts:
        raise GpuctlError("no node is in the cluster now", "see `gpuctl status`")
    at_once = tunnels.AT_ONCE if any(host.tunnel for host in hosts) else _AT_ONCE
    if len(hosts) > at_once:
        say(f"{at_once} nodes at a time, {len(hosts)} in all")
    commands = _ParallelCommands(max(len(host.node) for host in hosts))
    with node_access.stop_on_sigterm(), ThreadPoolExecutor(min(len(hosts), at_once)) as pool:
        ends = [pool.submit(commands.run_on, nodes, host, words) for host in hosts]
        try:
            codes = [end.result() for end in ends]
        except BaseException as error:
            commands.stop()
            if isinstance(error, KeyboardInterrupt):
                raise Interrupted("interrupted") from error
            raise
    failed = [(host, code) for host, code in zip(hosts, codes, strict=True) if code]
    if failed and len(hosts) > 1:
        say("failed: " + ", ".join(f"{host.node} ({_word(code)})" for host, code in failed))
    return failed[0][1] if failed else 0


class _ParallelCommands:
    """Runs a command on several nodes, and prints whole lines, each behind its node's name."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._writing = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._stopped = False

    def run_on(self, nodes: node_access.NodeAccess, host: Host, words: list[str]) -> int:
        """Run to the end; returns the exit code."""
        try:
            command = nodes.shell.run(host, words)
            with self._writing:
                if self._stopped:
                    return _UNREACHED
                process = subprocess.Popen(
                    command.argv,
                    cwd=command.cwd,
                    env=command.env,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                )
                self._running.add(process)
            self._copy(host, process)
            code = node_access.shells(process.wait())
            trouble = nodes.shell.trouble(host, code)
        except FileNotFoundError as error:
            code, trouble = 127, GpuctlError(f"{error.filename} not found on {host.node}")
        except GpuctlError as error:
            code, trouble = _UNREACHED, error
        if trouble:
            with self._writing:
                fail(str(trouble))
        return code

    def stop(self) -> None:
        with self._writing:
            self._stopped = True
        for process in self._running:
            node_access.end(process)

    def _copy(self, host: Host, process: subprocess.Popen[bytes]) -> None:
        """Print what ``process`` writes until it ends. Its pipes may stay open for longer: a connection that later
        commands share has them too, in its ProxyCommand."""
        assert process.stdout is not None
        assert process.stderr is not None
        with process.stdout as out, process.stderr as err, selectors.DefaultSelector() as pipes:
            for source, target in ((out, sys.stdout), (err, sys.stderr)):
                prefix = styled(host.node.ljust(self._width), _COLOURS[host.index % len(_COLOURS)], target)
                pipes.register(source, selectors.EVENT_READ, _Lines(prefix, target, self._writing))
            open_ones = {key.fd: key.data for key in pipes.get_map().values()}
            has_ended = False
            while open_ones and not has_ended:
                has_ended = process.poll() is not None  # looked at first: what it wrote is in the pipes by then
                for key, _ in pipes.select(0 if has_ended else _LOOK_S):
                    data = os.read(key.fd, _PIPE_BYTES)
                    open_ones[key.fd].take(data)
                    if not data:
                        pipes.unregister(key.fd)
                        del open_ones[key.fd]
            for lines in open_ones.values():
                lines.take(b"")


class _Lines:
    """Prints a stream in whole lines, each behind ``prefix``."""

    def __init__(self, prefix: str, target: TextIO, writing: threading.Lock) -> None:
        self._prefix = prefix
        self._target = target
        self._writing = writing
        self._rest = b""

    def take(self, data: bytes) -> None:
        """``data``: empty at the end of the stream."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if not data and self._rest:
            lines.append(self._rest)
        with self._writing:
            for line in lines:
                text = line.decode(errors="replace").rstrip("\r")
                self._target.write(f"{self._prefix} | {text}\n")
            self._target.flush()


def _word(code: int) -> str:
    return "not reached" if code == _UNREACHED else f"exit {code}"
