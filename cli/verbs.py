"""The table of verbs, and a command group that loads a verb's module only when that verb is used.

``gpuctl --help`` is printed from the table alone. A test keeps the table's lines equal to the verbs' own docstrings.
"""

from __future__ import annotations

import difflib
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from typer.main import get_command

from gpuctl.cli.signals import Interrupted, Terminated
from gpuctl.cli.text_commands import CLUSTER, TextCommand, TextGroup, single
from gpuctl.cluster.errors import BadInput, GpuctlError


class Verb(NamedTuple):
    module: str
    about: str


_ABOUT: dict[str, dict[str, str]] = {
    "Machines": {
        "up": "Create a cluster, or what is missing of it.",
        "check": "Check whether a cloud would provide these machines.",
        "status": "Show nodes, rank 0 and the progress of jobs.",
        "net": "Show the nodes' networks, and which can reach each other.",
        "repair": "Replace missing machines of a rented cluster.",
        "verify": "Test the nodes' devices and the network between them.",
        "preempt": "Preempt a node, as a cloud would.",
        "down": "Remove the cluster; keep the checkpoints.",
        "attach": "Use a cluster created on another machine.",
    },
    "Costs": {
        "offers": "List machine types and prices, the cheapest GPU first.",
        "cost": "Show the cost of a cluster's machines so far.",
        "leaks": "Find resources left in a cloud, and what they cost.",
        "buckets": "List or delete buckets of past clusters.",
    },
    "Jobs": {
        "train": "Run a script on the cluster and show its output.",
        "logs": "Show the output of a job, or the boot log of a machine.",
        "jobs": "List the jobs, the newest last.",
        "cancel": "Cancel a job after a last checkpoint.",
        "ckpt": "List, fetch, check or delete a job's checkpoints.",
        "env": "List or remove the environments that jobs run in.",
        "image": "Build, list or remove container images.",
        "mingle": "Meet other machines under an ID, and run a command with them.",
    },
    "Nodes": {
        "ssh": "Log in to a node, or run a command there.",
        "exec": "Run a command on one node or all.",
        "shell": "Open a shell where a job runs, or run a command there.",
        "jupyter": "Run JupyterLab where a job runs, and forward it.",
        "code": "Open a job's folder on a node in an editor.",
        "cp": "Copy files to or from a node.",
        "forward": "Forward a node's port, or TensorBoard, to this machine.",
    },
    "Other": {
        "demo": "Train on four local nodes and lose two of them on the way.",
        "config": "Show the settings and where each comes from.",
        "completion": "Print a shell's completion script.",
    },
}
SECTIONS: dict[str, dict[str, Verb]] = {
    title: {name: Verb(f"gpuctl.cli.commands.{title.lower()}.{name}", about) for name, about in verbs.items()}
    for title, verbs in _ABOUT.items()
}
VERBS: dict[str, Verb] = {name: verb for section in SECTIONS.values() for name, verb in section.items()}


class ReaderLeft(Exception):
    """The pipe that standard output goes to was closed (``| head``)."""


class VerbGroup(TextGroup):
    """Its commands are those of ``VERBS``; the types of the base class's arguments are Typer's own affair."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        return load(cmd_name) if cmd_name in VERBS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in VERBS and not args[0].startswith("-"):
            near = difflib.get_close_matches(args[0], VERBS, n=1)
            raise BadInput(
                f"unknown command {args[0]!r}", f"did you mean `gpuctl {near[0]}`?" if near else "see `gpuctl --help`"
            )
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Handle exceptions before Typer does."""
        _refuse_deleted_folder()
        try:
            return super().invoke(ctx)
        except Terminated as error:
            raise Interrupted("terminated", error.exit_code) from error
        except KeyboardInterrupt as error:
            raise Interrupted("interrupted") from error
        except BrokenPipeError as error:
            raise ReaderLeft from error
        except GpuctlError as error:
            if cluster := ctx.meta.get(CLUSTER):
                from gpuctl.cli.render.hints import name_cluster

                name_cluster(error, cluster, _verb_with_cluster)
            raise

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        width = max(map(len, VERBS))
        for title, verbs in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), verb.about) for name, verb in verbs.items()])


def _refuse_deleted_folder() -> None:
    try:
        Path.cwd()
    except FileNotFoundError as error:
        raise BadInput("the working folder has been deleted", "cd to an existing one") from error


def _verb_with_cluster(verb: str, below: str) -> str:
    """See ``name_cluster``."""
    if verb not in VERBS:
        return ""
    command = load(verb)
    if below in getattr(command, "commands", {}):
        verb, command = f"{verb} {below}", command.commands[below]
    return verb if any(param.name == "cluster" for param in command.params) else ""


def load(name: str) -> Any:
    """The command of one verb, from its module."""
    module = import_module(VERBS[name].module)
    app = getattr(module, "app", None) or single(
        getattr(module, "verb", None) or getattr(module, name), getattr(module, "COMMAND", TextCommand)
    )
    command = get_command(app)
    command.name = name
    return command
