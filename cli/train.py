"""``gpuctl train``"""

from __future__ import annotations

import getpass
import socket
import warnings
from pathlib import Path
from typing import Annotated

import typer

from gpuctl.cli.access import reach_with
from gpuctl.cli.follow import Follower, Printer, tell_end
from gpuctl.cli.options import Cluster, parse_flag, text_option
from gpuctl.cli.settings import load, parse_nodes
from gpuctl.cli.terminal import bar, count, out, say, size
from gpuctl.cli.verbs import Interrupted
from gpuctl.cluster import jobs, packing
from gpuctl.cluster.bucket import Bucket
from gpuctl.cluster.errors import BadInput
from gpuctl.cluster.records import JobSpec


def verb(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="Python script in the working folder or below.")],
    args: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", help="The script's own arguments, after `--`.")
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Start it and return; print the job's id.")] = False,
    nodes: Annotated[
        str | None, text_option("--nodes", "-n", metavar="N|MIN:MAX", about="Fewer than the cluster has.")
    ] = None,
    nproc: Annotated[
        str | None, text_option("--nproc", metavar="K", about="Worker processes per node (default: its slots).")
    ] = None,
    env: Annotated[
        list[str] | None,
        text_option("--env", "-e", metavar="NAME=VALUE", about="Variable for the workers; repeatable."),
    ] = None,
    image: Annotated[
        str | None,
        text_option("--image", metavar="IMAGE", about="Container image with torch, to run the workers in."),
    ] = None,
    max_restarts: Annotated[
        str | None, text_option("--max-restarts", metavar="N", about="Starts anew after a failure of the script.")
    ] = None,
    cluster: Cluster = None,
) -> None:
    """Run a script on the cluster and show what it prints.

    Packs the working folder (without what .gitignore names), puts the job in line, and returns its exit code. Ctrl-C
    leaves the job running.
    """
    settings = load(
        {"cluster": cluster, "nproc": nproc, "image": image, "env": env or (), "max_restarts": max_restarts}
    )
    wanted = parse_flag("--nodes", nodes, parse_nodes)
    name = checked_script(script, Path.cwd())
    access = reach_with(settings)
    spec = jobs.cluster_spec(access.store)
    jobs.check_nodes(spec, wanted)
    code = send_folder(access.store, Path.cwd(), name)
    request = jobs.Request(
        script=name,
        args=tuple(args or ()),
        env=tuple(settings.env.items()),
        code=code,
        nodes=wanted,
        nproc=settings.nproc,
        max_restarts=settings.max_restarts,
        image=settings.image or "",
        submitted_by=_who(),
    )
    job = jobs.submit(access.store, spec, request)
    option = "" if spec.name == "default" else f" --cluster {spec.name}"
    if detach:
        out(job.job)
        say(f"watch it with: gpuctl logs -f {job.job}{option}")
        return
    _attend(access.store, job, option)


def checked_script(script: str, folder: Path) -> str:
    """The script's path below ``folder``. Raises ``BadInput`` before anything is sent if it cannot run."""
    path = folder / script
    if not path.is_file():
        there = sorted(file.name for file in folder.glob("*.py"))[:5]
        hint = f"scripts here: {', '.join(there)}" if there else "run `gpuctl train` in the folder that holds it"
        raise BadInput(f"there is no script {script}", hint)
    if not path.resolve().is_relative_to(folder.resolve()):
        raise BadInput(
            f"{script} is outside of the working folder, which is what the nodes get",
            f"run `gpuctl train {path.name}` in {path.resolve().parent}",
        )
    name = path.resolve().relative_to(folder.resolve()).as_posix()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(path.read_bytes(), name, "exec")
    except SyntaxError as error:
        raise BadInput(f"{name}:{error.lineno or 1}: {error.msg}", "mend the script; nothing was started") from error
    except ValueError as error:
        raise BadInput(f"{name} is not a Python script: {error}", "nothing was started") from error
    return name


def send_folder(store: Bucket, folder: Path, script: str) -> str:
    """Pack ``folder`` and send it unless the bucket has it; returns its digest."""
    items = packing.survey(folder)
    if script not in {item.name for item in items}:
        raise BadInput(f"{script} is left out by .gitignore, so the nodes would not get it", "change .gitignore")
    with packing.packed(items) as code:
        what = f"code ({count(code.files, 'file')})"
        if packing.is_there(store, code.digest):
            say(f"{what}: {size(code.bytes)}, already there")
        else:
            with bar(what, code.bytes) as sent:
                packing.upload(store, code, sent)
        return code.digest


def _attend(store: Bucket, job: JobSpec, option: str) -> None:
    try:
        say(f"job {job.job} is in line (Ctrl-C leaves it running)")
        outcome = Follower(store, job, Printer()).to_the_end()
    except KeyboardInterrupt as error:
        raise Interrupted(
            f"left {job.job} running\n"
            f"  come back: gpuctl logs -f {job.job}{option}\n"
            f"  end it:    gpuctl cancel {job.job}{option}"
        ) from error
    tell_end(job, outcome)


def _who() -> str:
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (KeyError, OSError):
        return socket.gethostname()
