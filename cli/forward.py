"""``gpuctl forward``"""

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

from gpuctl.cli import remote
from gpuctl.cli.access import reach
from gpuctl.cli.options import Bucket, Cluster, text_option
from gpuctl.cli.terminal import out, say
from gpuctl.cluster import jobs
from gpuctl.cluster.errors import BadInput, GpuctlError
from gpuctl.stacks.hosts import Host
from gpuctl.stacks.shell import Here, Remote

_PATIENCE_S = 30.0
_LOCALHOST = "127.0.0.1"


def verb(
    what: Annotated[str, typer.Argument(metavar="PORT|tensorboard", help="A port of the node, or TensorBoard.")],
    node: Annotated[
        str | None,
        text_option("--node", metavar="NODE", about="Its name or its index in rank order (default: 0, rank 0)."),
    ] = None,
    job: Annotated[
        str | None, text_option("--job", metavar="JOB", about="Whose TensorBoard (default: the newest job).")
    ] = None,
    cluster: Cluster = None,
    bucket: Bucket = None,
) -> None:
    """Bring a port of a node, or TensorBoard, to this machine.

    Prints the URL and stays until Ctrl-C. The port here is the same one if it is free. TensorBoard runs on the node,
    over all that the job has written so far and goes on writing.
    """
    port = None if what == "tensorboard" else parse_port(what)
    if port is not None and job is not None:
        raise BadInput("--job is for tensorboard", "leave it out")
    with remote.reached(reach(cluster, bucket)) as nodes, ExitStack() as stack:
        host = nodes.chosen(node)
        if port is None:
            ending, port = stack.enter_context(_tensorboard(nodes, host, jobs.find(nodes.store, job).job))
        elif isinstance(nodes.shell, Here):
            nodes.shell.place(host)
            say(f"{host.node} is on this machine, and so is its port {port}")
            out(f"http://{host.address}:{port}")
            return
        if isinstance(nodes.shell, Remote):
            ending, port = stack.enter_context(_forwarded(nodes.shell, host, port))
        out(f"http://{_LOCALHOST}:{port}")
        say("Ctrl-C ends it")
        sys.stdout.flush()
        with contextlib.suppress(KeyboardInterrupt):
            code = remote.shells(ending.wait())
            raise nodes.shell.trouble(host, code) or GpuctlError(
                f"the connection to {host.node} has ended", "run it again"
            )


def parse_port(text: str) -> int:
    """Raises ``BadInput``."""
    if not re.fullmatch(r"\d{1,5}", text, re.ASCII) or not 0 < int(text) < 65536:
        raise BadInput(f"{text!r} is no port", "use one from 1 to 65535, or tensorboard")
    return int(text)


@contextmanager
def _forwarded(shell: Remote, host: Host, port: int) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The ssh that carries it, and the port here."""
    local = _free_port(port)
    with remote.started(shell.forward(host, local, port), stdin=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + _PATIENCE_S
        while not _answers(local):
            if process.poll() is not None:
                code = remote.shells(process.returncode)
                raise shell.trouble(host, code) or GpuctlError(f"ssh to {host.node} has ended ({code})", "try again")
            if time.monotonic() > deadline:
                raise GpuctlError(f"{host.node} was not reached in {_PATIENCE_S:g} s", "see `gpuctl status`")
            time.sleep(0.02)
        yield process, local


@contextmanager
def _tensorboard(nodes: remote.Nodes, host: Host, job: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The process that lives as long as it does, and its port on the node."""
    command = nodes.shell.python(host, "gpuctl.bootstrap.tensorboard", [job])
    with remote.started(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.match(rb"port (\d+)", line):
                yield process, int(found[1])
                return
        code = remote.shells(process.wait())
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
    raise GpuctlError("this machine has no free port", "end something that listens")


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((_LOCALHOST, port)) == 0
