"""``gpuctl train``: runs a script on the cluster and shows its output."""

from __future__ import annotations

import getpass
import os
import socket
import warnings
from pathlib import Path
from typing import Annotated

import typer

from gpuctl.cli.render.job.follow import Follower, tell_end
from gpuctl.cli.render.job.log_lines import Printer
from gpuctl.cli.render.terminal import count, out, say
from gpuctl.cli.session.job_upload import choose, read_wheels, refuse_home, send_folder, send_wheels
from gpuctl.cli.session.open_cluster import USED, OpenCluster, reach_with
from gpuctl.cli.settings.options import Cluster, parse_flag, refuse_unknown_stop_signal, text_option
from gpuctl.cli.settings.resolve import Settings, load, parse_nodes
from gpuctl.cli.signals import Interrupted
from gpuctl.cluster.environments import images
from gpuctl.cluster.errors import BadInput
from gpuctl.cluster.jobs import queue
from gpuctl.cluster.records.jobs import JobSpec
from gpuctl.trainers.launchers.adapter import FOREIGN, Launcher, Process, World, all_variables, named

_RESERVED = frozenset(
    [
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_RESTART_COUNT",
        "GPUCTL_CLUSTER",
        "GPUCTL_BUCKET",
        "GPUCTL_JOB",
        "GPUCTL_ROUND",
        "GPUCTL_NODE",
        "GPUCTL_ROUND_DIR",
        "GPUCTL_CHECKPOINT_DIR",
        "GPUCTL_TENSORBOARD_DIR",
        "GPUCTL_STRATEGY",
        "GPUCTL_LAUNCHER",
        "GPUCTL_NODE_ADDRESSES",
        "GPUCTL_HOSTFILE",
    ]
)
"""Variables (see ``cluster.worker_context``, and torchrun's own)."""
_WORKERS_PER_CORE = 8


def verb(
    script: Annotated[
        str, typer.Argument(metavar="SCRIPT", help="Script in the working folder or below; with exec, any program.")
    ],
    args: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", help="The script's own arguments, after `--`.")
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Start the job in the background; print its id.")
    ] = False,
    nodes: Annotated[
        str | None, text_option("--nodes", "-n", metavar="N|MIN:MAX", about="Nodes to use (default: all).")
    ] = None,
    nproc: Annotated[
        str | None, text_option("--nproc", metavar="K", about="Worker processes per node (default: its slots).")
    ] = None,
    launcher: Annotated[
        str | None,
        text_option("--launcher", metavar="NAME", about="torchrun (default), jax, tensorflow, horovod or exec."),
    ] = None,
    strategy: Annotated[
        str | None,
        text_option(
            "--strategy",
            metavar="NAME[:OPTION=VALUE,…]",
            about="What ranks exchange under gpuctl.Trainer: exact, bf16, fp16, int8, topk, dgc, powersgd, localsgd or "
            "diloco (default: as the script says).",
        ),
    ] = None,
    env: Annotated[
        list[str] | None,
        text_option("--env", "-e", metavar="NAME=VALUE", about="Variable for the workers; repeatable."),
    ] = None,
    image: Annotated[
        str | None,
        text_option("--image", metavar="IMAGE", about="Container image with the framework, to run the workers in."),
    ] = None,
    environment: Annotated[
        str | None,
        text_option(
            "--environment",
            metavar="FILE|none",
            about="File with the script's packages (default: the first of uv.lock, pylock.toml, requirements.txt and "
            "environment.yml that is there).",
        ),
    ] = None,
    wheels: Annotated[
        str | None,
        text_option("--wheels", metavar="FOLDER", about="Wheels to install them from, in place of an index."),
    ] = None,
    max_restarts: Annotated[
        str | None, text_option("--max-restarts", metavar="N", about="Restarts after a failure of the script.")
    ] = None,
    exit_timeout: Annotated[
        str | None,
        text_option(
            "--exit-timeout", metavar="SECONDS", about="For idle ranks once others have ended (default: 60; 0: never)."
        ),
    ] = None,
    allow_tcp: Annotated[
        bool, typer.Option("--allow-tcp", help="Start even if NCCL cannot use the nodes' EFA or InfiniBand.")
    ] = False,
    cluster: Cluster = None,
) -> None:
    """Run a script on the cluster and show its output.

    Packs the working folder (without what .gitignore and .gpuctlignore name, and without keys and passwords, such as
    .env, *.pem and .aws), puts the job in line, and returns its exit code. Ctrl-C leaves the job running.
    """
    settings = load(
        {
            "cluster": cluster,
            "nproc": nproc,
            "launcher": launcher,
            "strategy": strategy,
            "image": image,
            "environment": environment,
            "env": env or (),
            "max_restarts": max_restarts,
            "exit_timeout": exit_timeout,
        },
        only=(*USED, "nproc", "launcher", "strategy", "image", "environment", "env", "max_restarts", "exit_timeout"),
    )
    chosen = named(settings.launcher)
    _refuse_reserved(settings, chosen)
    _refuse_strategy_without_trainer(settings, chosen)
    wanted = parse_flag("--nodes", nodes, parse_nodes)
    refuse_home(Path.cwd())
    name = (checked_program if chosen.name == "exec" else checked_script)(script, Path.cwd())
    packages = choose(Path.cwd(), settings.environment, settings.image)
    given = None if wheels is None else read_wheels(wheels, packages)
    per_node = settings.nproc or (1 if chosen.one_per_node else None)
    access = reach_with(settings)
    spec = queue.cluster_spec(access.store)
    _, most = queue.check_nodes(spec, wanted)
    _warn_of_many(spec.provider, most * (per_node or spec.slots or 1))
    images.pinned(access.store, settings.image or "")  # before anything is sent
    code = send_folder(access.store, Path.cwd(), name, packages.files if packages else ())
    source = packages.source if packages else None
    if source and given:
        source = send_wheels(access.store, given, source)
    request = queue.JobRequest(
        script=name,
        args=tuple(args or ()),
        env=tuple(settings.env.items()),
        code=code,
        nodes=wanted,
        nproc=per_node,
        launcher=settings.launcher,
        strategy=settings.strategy or "",
        max_restarts=settings.max_restarts,
        exit_timeout_s=settings.exit_timeout,
        image=images.pinned(access.store, settings.image or ""),
        environment=source,
        allow_tcp=allow_tcp,
        submitted_by=_who(),
    )
    job = queue.submit(access.store, spec, request)
    if why := access.why_ended():
        say(f"warning: {why}")
    option = "" if spec.name == "default" else f" --cluster {spec.name}"
    if detach:
        out(job.job)
        say(f"watch it with: gpuctl logs -f {job.job}{option}")
        return
    _attend(access, job, option)


def _warn_of_many(provider: str, workers: int) -> None:
    """Warn of too many workers on this machine: PyTorch alone takes 200 MB in each."""
    cores = os.cpu_count() or 1
    if provider == "local" and workers > _WORKERS_PER_CORE * cores:
        say(f"warning: {workers} processes on this machine with {count(cores, 'core')}; --nproc sets how many per node")


def _refuse_reserved(settings: Settings, launcher: Launcher) -> None:
    """Raises ``BadInput`` for a variable that the launcher sets for each worker: it would have no effect."""
    for name in settings.env:
        if name in _RESERVED or (launcher.name != "torchrun" and _overrides(launcher, name)):
            source = settings.found[f"env.{name}"].source
            raise BadInput(f"{name} (from {source}) is set for each worker by gpuctl", "use another name")
    refuse_unknown_stop_signal(settings.env)


def _refuse_strategy_without_trainer(settings: Settings, launcher: Launcher) -> None:
    """Raises ``BadInput`` for a strategy under a launcher whose processes make no ``gpuctl.Trainer``."""
    if settings.strategy and launcher.name != "torchrun":
        source = settings.found["strategy"].source
        given = "--strategy" if source == "flag" else f"strategy (from {source})"
        raise BadInput(
            f"{given} is for gpuctl.Trainer under torchrun: --launcher {launcher.name} has no use for it",
            "leave out one of the two",
        )


def _overrides(launcher: Launcher, name: str) -> bool:
    """Whether the launcher sets this variable, whatever the job says."""
    anywhere = World("job", 1, 0, ("127.0.0.1",), (2,), "127.0.0.1", 1)
    theirs = "their own"
    sets = all_variables(launcher, Process(anywhere, 0, {name: theirs}, ("", "")))
    return name.startswith(FOREIGN) or sets.get(name, theirs) != theirs


def checked_program(program: str, folder: Path) -> str:
    """As ``checked_script``, for any program: one in the folder, or one that the nodes have in their PATH."""
    path = folder / program
    if program.endswith(".py") or path.is_dir():
        return checked_script(program, folder)
    if not path.is_file():
        if "/" in program and not Path(program).is_absolute():
            raise BadInput(
                f"program {program} does not exist", "name one below the working folder, or one of the nodes'"
            )
        return program
    is_inside = path.resolve().is_relative_to(folder.resolve())
    if Path(program).is_absolute() and not is_inside:
        return program
    if not is_inside:
        raise BadInput(
            f"program {program} is outside the working folder, and only that is copied to the nodes",
            f"run `gpuctl train` in {path.resolve().parent}",
        )
    if not os.access(path, os.X_OK):
        raise BadInput(f"{program} may not be executed", f"make it a program: chmod +x {program}")
    return path.resolve().relative_to(folder.resolve()).as_posix()


def checked_script(script: str, folder: Path) -> str:
    """The script's path below ``folder``. Raises ``BadInput`` before anything is sent if it cannot run."""
    path = folder / script
    if path.is_dir():
        raise BadInput(f"{script} is a folder, not a script", "name a script in it")
    if not path.is_file():
        there = sorted(file.name for file in folder.glob("*.py"))[:5]
        hint = f"scripts here: {', '.join(there)}" if there else "run `gpuctl train` in the folder that holds it"
        raise BadInput(f"script {script} does not exist", hint)
    if not path.resolve().is_relative_to(folder.resolve()):
        raise BadInput(
            f"{script} is outside the working folder, and only that is copied to the nodes",
            f"run `gpuctl train {path.name}` in {path.resolve().parent}",
        )
    name = path.resolve().relative_to(folder.resolve()).as_posix()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(path.read_bytes(), name, "exec")
    except SyntaxError as error:
        raise BadInput(f"{name}:{error.lineno or 1}: {error.msg}", "fix the script; nothing was started") from error
    except ValueError as error:
        raise BadInput(f"{name} is not a Python script: {error}", "nothing was started") from error
    return name


def _attend(access: OpenCluster, job: JobSpec, option: str) -> None:
    try:
        say(f"job {job.job} is queued (Ctrl-C detaches; the job goes on)")
        outcome = Follower(access.store, job, Printer(live=True), why_silent=access.why_ended).to_the_end()
    except KeyboardInterrupt as error:
        raise Interrupted(
            f"detached; {job.job} goes on\n"
            f"  reattach: gpuctl logs -f {job.job}{option}\n"
            f"  cancel:   gpuctl cancel {job.job}{option}"
        ) from error
    tell_end(job, outcome)


def _who() -> str:
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (KeyError, OSError):
        return socket.gethostname()
