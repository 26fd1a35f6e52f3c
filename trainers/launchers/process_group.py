"""The processes of one node in a round, under any launcher: started together, and ended together.

In none of the frameworks does a process go on by itself once another one is lost: it fails, hangs or aborts, after up
to 100 s. So the first that fails here ends the others of this node, and the round ends those of all nodes.

Run as a program (``python -m gpuctl.trainers.launchers.process_group LAUNCHER NPROC CMD…``) it is the command of
``gpuctl mingle --launcher``, whose variables tell it of the round.

Also read by the interpreters of images, which have no gpuctl: the standard library only, from Python 3.8 on.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from gpuctl.trainers import failing_exit
from gpuctl.trainers.launchers.adapter import FOREIGN, Launcher, Process, World, all_variables, joined, named
from gpuctl.trainers.launchers.key_value_store import KeyValueStore, get, put

_MEET_S = 300.0
"""For all nodes of a round to have come. Whoever stays away for long is lost, and the next round ends this one."""
_GRACE_S = 10.0
_SITE = str(Path(__file__).parent / "worker_site")
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126
"""Exit codes, as the shell has them."""
_PYTHON = re.compile(r"(.*/)?python[0-9.]*")


class Failure(NamedTuple):
    """A process that did not end with exit code 0, of itself."""

    local_rank: int
    exit_code: int
    """As the shell has it: 128 + signal number."""
    pid: int = 0


class Unable(Exception):
    """Nothing can be started here; the message says why, and what to do."""


def run(
    launcher: Launcher,
    world: World,
    command: Sequence[str],
    env: Mapping[str, str],
    log_dir: Path | None = None,
    listening: socket.socket | None = None,
) -> list[Failure]:
    """Run ``command`` as each process of this node, until all have ended; returns those that failed.

    Args:
        launcher: whose variables they get.
        world: the round.
        command: a program with its arguments; a Python script is run by this interpreter.
        env: the job's own variables, and all that the processes get besides.
        log_dir: their output goes below it, where torchrun's would; ``None``: where this process's own goes.
        listening: holds the master's port, on rank 0.

    Raises ``Unable``.
    """
    command = [sys.executable, "-u", *command] if command[0].endswith(".py") else list(command)
    if launcher.name in failing_exit.WAIT_AT_THEIR_END:
        command = failing_exit.run_by(command)
    packages = _packages(launcher, command, env)
    env = {name: value for name, value in env.items() if not name.startswith(FOREIGN)}
    env["PYTHONPATH"] = os.pathsep.join([_SITE, *filter(None, [env.get("PYTHONPATH")])])
    if world.nproc > 1:
        env.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does: each would take all cores
    with contextlib.ExitStack() as held:
        env["GPUCTL_HOSTFILE"] = _hostfile(world, log_dir or Path(held.enter_context(TemporaryDirectory())))
        peers = _peers(launcher, world, listening, held)
        processes = []
        for local_rank in range(world.nproc):
            process = Process(world, local_rank, env, peers, packages)
            log = _log(log_dir, world, local_rank, held)
            processes.append(_started(command, {**env, **all_variables(launcher, process)}, log))
        return _ended(processes, softly=launcher.ends_softly)


def missing(launcher: Launcher, command: Sequence[str], env: Mapping[str, str]) -> str:
    """What has to be installed here for ``command`` to be run; empty if nothing is known to be missing."""
    try:
        _packages(launcher, command, env)
    except Unable as error:
        return str(error)
    return ""


def _packages(launcher: Launcher, command: Sequence[str], env: Mapping[str, str]) -> frozenset[str]:
    """Those of the launcher's packages that the interpreter of ``command`` has. Raises ``Unable`` without the one that
    it needs. Nothing is known of a program that is not Python."""
    python = sys.executable if command[0].endswith(".py") else command[0]
    if not launcher.needs or not _PYTHON.fullmatch(python):
        return frozenset(launcher.packages)
    wanted = (launcher.needs, *launcher.packages)
    look = "import importlib.util as u, sys; print(*[n for n in sys.argv[1:] if u.find_spec(n)])"
    try:
        asked = subprocess.run(
            [python, "-c", look, *wanted], env=dict(env), stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
    except OSError as error:
        raise Unable(f"{python}: {error.strerror}") from error
    found = frozenset(asked.stdout.split())
    if launcher.needs not in found:
        raise Unable(f"{python} has no {launcher.needs} on this node; install it there: {launcher.install}")
    return found


def _peers(
    launcher: Launcher, world: World, listening: socket.socket | None, held: contextlib.ExitStack
) -> tuple[str, ...]:
    """``host:port`` of every process of the round, if the launcher wants that. ``held`` keeps what must be kept until
    the processes have ended: the ports of this node, and the store on rank 0."""
    if not launcher.meets:
        if listening is not None:
            held.enter_context(_reserved(world.master_address, world.master_port, closing=listening))
        return ()
    if world.rank == 0:
        listening = listening or _listening(world.master_address, world.master_port)
        held.callback(KeyValueStore(listening).close)
    ports = [held.enter_context(_reserved(world.hosts[world.rank], 0)) for _ in range(world.nproc)]
    own = [joined(world.hosts[world.rank], port.getsockname()[1]) for port in ports]
    deadline = time.monotonic() + _MEET_S
    where = world.master_address, world.master_port
    try:
        put(*where, f"gpuctl/{world.rank}", " ".join(own).encode(), deadline)
        told = [get(*where, f"gpuctl/{rank}", deadline).decode().split() for rank in range(len(world.hosts))]
    except TimeoutError as error:
        raise Unable(f"not all nodes of the round have come: {error}") from error
    return tuple(peer for node in told for peer in node)


def _hostfile(world: World, folder: Path) -> str:
    """A file in the form that ``mpirun --hostfile`` reads; its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "hostfile"
    path.write_text("".join(f"{host} slots={world.nprocs[rank]}\n" for rank, host in enumerate(world.hosts)))
    return str(path)


def _listening(host: str, port: int) -> socket.socket:
    return socket.create_server((host, port), family=_family(host), backlog=1024)


def _reserved(host: str, port: int, closing: socket.socket | None = None) -> socket.socket:
    """A socket that keeps a port: the kernel gives it to nobody, while a program that names it may listen there, as
    gRPC's servers do. ``closing``: who had it until now."""
    if closing is not None:
        closing.shutdown(socket.SHUT_RDWR)  # others have it open too, and it would listen on for as long as they do
        closing.close()
    keeper = socket.socket(_family(host))
    keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if hasattr(socket, "SO_REUSEPORT"):
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    keeper.bind((host, port))
    return keeper


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _log(log_dir: Path | None, world: World, local_rank: int, held: contextlib.ExitStack) -> int | None:
    if log_dir is None:
        return None
    path = log_dir / f"{world.job}-{world.round}" / "attempt_0" / str(local_rank) / "stdout.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    return held.enter_context(path.open("ab")).fileno()


def _started(command: Sequence[str], env: Mapping[str, str], log: int | None) -> subprocess.Popen[bytes]:
    """A process; one that cannot be started is told as a shell would, in its output and by its exit code."""
    error = subprocess.STDOUT if log is not None else None
    program = command[0] if "/" in command[0] else shutil.which(command[0], path=env.get("PATH")) or command[0]
    try:
        return subprocess.Popen(
            [program, *command[1:]], env=dict(env), stdin=subprocess.DEVNULL, stdout=log, stderr=error
        )
    except OSError as why:
        if why.errno == errno.ENOEXEC:  # a script without a #! line, which a shell runs
            shell = ["/bin/sh", program, *command[1:]]
            return subprocess.Popen(shell, env=dict(env), stdin=subprocess.DEVNULL, stdout=log, stderr=error)
        code = _NOT_FOUND if isinstance(why, FileNotFoundError) else _NOT_EXECUTABLE
        said = f"{command[0]}: {_why_not(program, why)}"
        return subprocess.Popen(
            ["/bin/sh", "-c", f'echo "$0"; exit {code}', said], stdin=subprocess.DEVNULL, stdout=log, stderr=error
        )


def _why_not(program: str, why: OSError) -> str:
    if not isinstance(why, FileNotFoundError):
        return why.strerror or "cannot be started"
    if Path(program).exists():
        return "what its #! line names is not there; has the file Windows line ends?"
    return "command not found" + ("; arguments go after `--`" if " " in program else "")


def _ended(processes: Sequence[subprocess.Popen[bytes]], *, softly: bool) -> list[Failure]:
    """Wait for all; with the first that fails, end the others."""
    running = list(processes)
    while running:
        _wait_for_one(running)
        running = [process for process in running if process.poll() is None]
        if any(process.returncode for process in processes if process not in running):
            failures = [
                Failure(local_rank, _shell_code(process.returncode), process.pid)
                for local_rank, process in enumerate(processes)
                if process.returncode
            ]
            _end(running, softly=softly)
            return failures
    return []


def _wait_for_one(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    if len(processes) == 1:
        processes[0].wait()
    else:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)  # this process has no other children


def _end(processes: Iterable[subprocess.Popen[bytes]], *, softly: bool) -> None:
    processes = list(processes)
    deadline = time.monotonic() + (_GRACE_S if softly else 0)
    for process in processes:
        process.terminate() if softly else process.kill()
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _shell_code(code: int) -> int:
    return 128 - code if code < 0 else code


def main(launcher: str, nproc: str, *command: str) -> int:
    """The command of ``gpuctl mingle --launcher``; returns its exit code. Signals are for the processes alone, which
    are in the same session."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda *_: None)  # not ignored, or the processes would inherit that
    hosts = tuple(os.environ["GPUCTL_NODE_ADDRESSES"].split(","))
    world = World(
        job=os.environ["MINGLE_ID"],
        round=int(os.environ["MINGLE_ROUND"]),
        rank=int(os.environ["NODE_RANK"]),
        hosts=hosts,
        nprocs=(int(nproc),) * len(hosts),
        master_address=os.environ["MASTER_ADDR"],
        master_port=int(os.environ["MASTER_PORT"]),
    )
    try:
        failures = run(named(launcher), world, command, os.environ)
    except Unable as error:
        print(f"gpuctl: {error}", file=sys.stderr)
        return 1
    code = failures[0].exit_code if failures else 0
    if code - 128 in {*signal.Signals}:  # then whoever started this names it
        if code - 128 != signal.SIGKILL:
            signal.signal(code - 128, signal.SIG_DFL)
        os.kill(os.getpid(), code - 128)
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
