"""``gpuctl exec``"""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Annotated, TextIO

import typer

from gpuctl.cli import remote
from gpuctl.cli.access import reach
from gpuctl.cli.options import Bucket, Cluster
from gpuctl.cli.terminal import fail, say, styled
from gpuctl.cli.verbs import Interrupted
from gpuctl.cluster.errors import BadInput, GpuctlError
from gpuctl.stacks.hosts import Host

COMMAND = remote.WithCommand

_AT_ONCE = 64
_UNREACHED = 255
_COLOURS = ("cyan", "yellow", "green", "red")


def verb(
    ctx: typer.Context,
    node: Annotated[
        str | None, typer.Argument(metavar="NODE", help="Its name or its index in rank order (default: 0, rank 0).")
    ] = None,
    everywhere: Annotated[bool, typer.Option("--all", "-a", help="On all nodes at the same time.")] = False,
    cluster: Cluster = None,
    bucket: Bucket = None,
) -> None:
    """Run a command on a node, or on all of them.

    One word after `--` is a line for the node's shell, several are a program and its arguments. With --all each line
    begins with its node, and the exit code is that of the first node in rank order that failed (255: not reached).
    Ctrl-C ends the connections; a program that has no terminal there may go on until it prints.
    """
    words = remote.words_of(ctx)
    if not words:
        raise BadInput("say what to run, after `--`", "such as: gpuctl exec --all -- nvidia-smi")
    if everywhere and node is not None:
        raise BadInput(f"--all and {node} say two things", "leave one of them out")
    with remote.reached(reach(cluster, bucket)) as nodes:
        if not everywhere:
            host = nodes.chosen(node)
            command = nodes.shell.run(host, words, terminal=remote.has_terminal())
            remote.leave_with(remote.run(nodes, host, command))
            return
        remote.leave_with(_on_all(nodes, words))


def _on_all(nodes: remote.Nodes, words: list[str]) -> int:
    hosts = [host for host in nodes.hosts if host.takes_part]
    for host in nodes.hosts:
        if not host.takes_part:
            say(f"{host.node}: left out, it takes no part")
    if not hosts:
        raise GpuctlError("no node takes part now", "see `gpuctl status`")
    chorus = _Chorus(max(len(host.node) for host in hosts))
    with remote.heeding_sigterm(), ThreadPoolExecutor(min(len(hosts), _AT_ONCE)) as pool:
        ends = [pool.submit(chorus.sing, nodes, host, words) for host in hosts]
        try:
            codes = [end.result() for end in ends]
        except BaseException as error:
            chorus.stop()
            if isinstance(error, KeyboardInterrupt):
                raise Interrupted("interrupted") from error
            raise
    failed = [(host, code) for host, code in zip(hosts, codes, strict=True) if code]
    if failed and len(hosts) > 1:
        say("failed: " + ", ".join(f"{host.node} ({_word(code)})" for host, code in failed))
    return failed[0][1] if failed else 0


class _Chorus:
    """Commands on several nodes whose lines come out whole, each behind its node's name."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._writing = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._stopped = False

    def sing(self, nodes: remote.Nodes, host: Host, words: list[str]) -> int:
        """Returns the exit code."""
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
            assert process.stdout is not None
            assert process.stderr is not None
            other = threading.Thread(target=self._copy, args=(host, process.stderr, sys.stderr))
            other.start()
            self._copy(host, process.stdout, sys.stdout)
            other.join()
            code = remote.shells(process.wait())
            trouble = nodes.shell.trouble(host, code)
        except FileNotFoundError as error:
            code, trouble = 127, GpuctlError(f"{error.filename} is not on {host.node}")
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
            remote.end(process)

    def _copy(self, host: Host, source: IO[bytes], target: TextIO) -> None:
        prefix = styled(host.node.ljust(self._width), _COLOURS[host.index % len(_COLOURS)], target)
        for line in source:
            text = line.decode(errors="replace").rstrip("\r\n")
            with self._writing:
                target.write(f"{prefix} | {text}\n")
                target.flush()


def _word(code: int) -> str:
    return "not reached" if code == _UNREACHED else f"exit {code}"
