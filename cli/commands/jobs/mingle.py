"""``gpuctl mingle``: machines that know nothing of each other meet under an ID, and run a command together."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from gpuctl.cli.render.terminal import out, out_json, say
from gpuctl.cli.settings.options import (
    Output,
    parse_flag,
    refuse_unknown_stop_signal,
    refuse_unusable,
    seconds,
    text_option,
    wants_json,
    whole_number,
)
from gpuctl.cli.settings.resolve import load, parse_nodes
from gpuctl.cli.signals import as_interrupts
from gpuctl.cluster.atomic_write import write_atomic
from gpuctl.cluster.errors import BadInput

_GRACE_S = 25.0
"""Kubernetes and Slurm kill 30 s after they have asked to end."""
_NOT_EXECUTABLE, _NOT_FOUND = 126, 127
"""Exit codes, as the shell has them."""


def verb(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="CMD", help="Command to run on each machine, after `--`.")
    ] = None,
    run_id: Annotated[str | None, text_option("--id", metavar="ID", about="The run's name, chosen by you.")] = None,
    nodes: Annotated[
        str | None, text_option("--nodes", "-n", metavar="N|MIN:MAX", about="How many machines meet.")
    ] = None,
    bucket: Annotated[
        str | None, text_option("--bucket", metavar="URL", about="A bucket or folder that all of them reach.")
    ] = None,
    rank: Annotated[
        str | None, text_option("--rank", metavar="R", about="This machine's rank (default: any that is free).")
    ] = None,
    timeout: Annotated[
        str | None, text_option("--timeout", metavar="SECONDS", about="Wait no longer (default: as long as it takes).")
    ] = None,
    address: Annotated[
        str | None, text_option("--address", metavar="IP", about="By which the others reach this machine.")
    ] = None,
    interface: Annotated[
        str | None, text_option("--interface", metavar="NAME", about="The same, as that interface's address.")
    ] = None,
    port: Annotated[
        str | None, text_option("--port", metavar="PORT", about="MASTER_PORT (default: one that is free on rank 0).")
    ] = None,
    max_restarts: Annotated[
        str | None, text_option("--max-restarts", metavar="N", about="Restarts after a failure of CMD.")
    ] = None,
    grace: Annotated[
        str | None, text_option("--grace", metavar="SECONDS", about="For CMD to end once it is asked to (default: 25).")
    ] = None,
    launcher: Annotated[
        str | None,
        text_option("--launcher", metavar="NAME", about="Run CMD as torchrun, jax, tensorflow, horovod or exec would."),
    ] = None,
    nproc: Annotated[
        str | None, text_option("--nproc", metavar="K", about="With --launcher: processes per machine (default: 1).")
    ] = None,
    env_file: Annotated[
        str | None, text_option("--env-file", metavar="FILE", about="Write NAME=VALUE lines there.")
    ] = None,
    output: Output = "text",
) -> None:
    """Meet other machines under an ID, and run a command with them.

    Needs no cluster: every machine, pod or shell runs the same line, in any order. With CMD it sets MASTER_ADDR, RANK,
    WORLD_SIZE and so on, and runs it anew whenever machines are lost or come; without, it prints those variables, for
    `eval`. See `docs/guides/mingle.md`.
    """
    from gpuctl.bootstrap.rendezvous.mingle import checked_rank, host_name, meet
    from gpuctl.bootstrap.rendezvous.own_address import own_address
    from gpuctl.bootstrap.rendezvous.participant import Attendee
    from gpuctl.bootstrap.rendezvous.runs import RunRequest
    from gpuctl.cluster.storage.bucket import open_bucket
    from gpuctl.trainers.launchers import process_group
    from gpuctl.trainers.launchers.adapter import named, stop_signal
    from gpuctl.trainers.launchers.process_group import missing

    as_json = wants_json(output)
    if run_id is None:
        raise BadInput("--id is missing", "choose a name that all machines of the run give, such as --id exp1")
    wanted = parse_flag("--nodes", nodes, parse_nodes)
    if wanted is None:
        raise BadInput("--nodes is missing", "say how many machines meet, such as --nodes 4, or --nodes 2:4")
    settings = load({"bucket": bucket, "max_restarts": max_restarts}, only=("bucket", "max_restarts"))
    if not settings.bucket:
        raise BadInput(
            "--bucket is missing", "name a bucket, or a folder that all machines share, such as file:///shared/mingle"
        )
    if not command and wanted[0] != wanted[1]:
        raise BadInput(f"--nodes {nodes} needs a command to run anew in each round", "add `-- CMD`, or give one number")
    if address is not None and interface is not None:
        raise BadInput("--address and --interface both choose an address", "leave out one of them")
    if command and (as_json or env_file is not None):
        raise BadInput("-o json and --env-file are for use without CMD", "CMD finds the variables in its environment")
    if not command and launcher is not None:
        raise BadInput("--launcher needs a command to run", "add `-- CMD`, such as `-- python train.py`")
    if launcher is None and nproc is not None:
        raise BadInput("--nproc is for --launcher", "add, for example, --launcher torchrun")
    chosen_launcher = parse_flag("--launcher", launcher, named)
    if chosen_launcher is not None:
        refuse_unknown_stop_signal(os.environ)
    processes = parse_flag("--nproc", nproc, whole_number(1)) or 1
    timeout_s = parse_flag("--timeout", timeout, seconds)
    grace_s = parse_flag("--grace", grace, seconds)
    master_port = parse_flag("--port", port, _port) or 0
    chosen = checked_rank(parse_flag("--rank", rank, whole_number(0)), *wanted)
    if env_file is not None:
        refuse_unusable("--env-file", env_file)
        _refuse_unwritable(Path(env_file))
    if command:
        _refuse_unknown(command[0])
        if chosen_launcher is not None and (what := missing(chosen_launcher, command, os.environ)):
            raise BadInput(*what.split("; ", 1))
    launch = f"--launcher {launcher} --nproc {processes}" if launcher is not None else ""
    request = RunRequest(run_id, *wanted, max_restarts=settings.max_restarts, host=host_name(), launch=launch)
    attendee = Attendee(request.host, own_address(address, interface), chosen, master_port)
    store = open_bucket(settings.bucket, patience_s=3.0, timeout_s=5.0)
    if command:
        from gpuctl.cli.commands.jobs.mingle_command import run

        stop: int = signal.SIGTERM
        if chosen_launcher is not None and launcher is not None:
            stop = stop_signal(chosen_launcher, os.environ)
            command = [sys.executable, "-P", "-m", process_group.__name__, launcher, str(processes), *command]
        run(store, request, attendee, command, timeout_s, _GRACE_S if grace_s is None else grace_s, _tell, stop)
        return
    with as_interrupts():
        place = meet(store, request, attendee, timeout_s, _tell)
    variables = place.variables(os.environ)
    if env_file is not None:
        _write(Path(env_file), "".join(f"{name}={value}\n" for name, value in variables.items()))
    if as_json:
        out_json({**msgspec.to_builtins(place), "env": variables})
    elif env_file is None:
        for name, value in variables.items():
            out(f"export {name}={shlex.quote(value)}")


def _port(text: str) -> int:
    number = whole_number(1)(text)
    if number > 65535:
        raise ValueError("is not a port; use 1 to 65535")
    return number


def _refuse_unwritable(file: Path) -> None:
    """Raises ``BadInput`` before the others have met this machine, which then has nothing to tell its launcher."""
    folder = file.resolve().parent
    if file.is_dir() or not os.access(file if file.exists() else folder, os.W_OK):
        raise BadInput(f"cannot write --env-file {file}", "name a file in a folder that is there and can be written")


def _write(file: Path, text: str) -> None:
    if file.exists() and not file.is_file():  # a pipe or a device, which somebody reads
        file.write_text(text)
    else:
        write_atomic(file.resolve(), text.encode())


def _refuse_unknown(program: str) -> None:
    """Raises ``BadInput`` for a command that cannot be run: the others would wait for it in vain."""
    if shutil.which(program) is not None:
        return
    if "/" in program and Path(program).exists():
        what = "is a folder" if Path(program).is_dir() else "may not be executed"
        error = BadInput(f"{program} {what}", "name a program, or make it one: chmod +x")
        error.exit_code = _NOT_EXECUTABLE
    else:
        error = BadInput(f"{program}: command not found", "give its path, or install it on this machine")
        error.exit_code = _NOT_FOUND
    raise error


def _tell(line: str) -> None:
    say(f"mingle: {line}")
