"""The table of verbs, and a command group that loads a verb's module only when that verb is used.

``gpuctl --help`` is printed from the table alone. A test keeps the table's lines equal to the verbs' own docstrings.
"""

from __future__ import annotations

import difflib
from importlib import import_module
from typing import Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from gpuctl.cluster.errors import BadInput, GpuctlError

EVERYWHERE: dict[str, Any] = {"help_option_names": ["-h", "--help"]}
"""Settings of every command."""


class Verb(NamedTuple):
    module: str
    about: str


SECTIONS: dict[str, dict[str, Verb]] = {
    "Machines": {
        "up": Verb("gpuctl.cli.up", "Make a cluster, or what is missing of it."),
        "offers": Verb("gpuctl.cli.offers", "List machines that could be rented, the cheapest GPU first."),
        "check": Verb("gpuctl.cli.check", "Ask a cloud whether it would give these machines."),
        "status": Verb("gpuctl.cli.status", "Show the nodes, rank 0 and how far the jobs are."),
        "net": Verb("gpuctl.cli.net", "Show the nodes' networks, and who can reach whom."),
        "repair": Verb("gpuctl.cli.repair", "Replace what is missing of a rented cluster."),
        "verify": Verb("gpuctl.cli.verify", "Test the nodes' devices and the network between them."),
        "preempt": Verb("gpuctl.cli.preempt", "Take a node away the way a cloud would."),
        "down": Verb("gpuctl.cli.down", "Take everything away but the checkpoints."),
        "cost": Verb("gpuctl.cli.cost", "Show what a cluster's machines have cost so far."),
        "leaks": Verb("gpuctl.cli.leaks", "Find what clusters have left in a cloud, and what it costs."),
    },
    "Jobs": {
        "train": Verb("gpuctl.cli.train", "Run a script on the cluster and show what it prints."),
        "logs": Verb("gpuctl.cli.logs", "Show what a job printed, or how a machine booted."),
        "jobs": Verb("gpuctl.cli.jobs", "List the jobs, the newest last."),
        "cancel": Verb("gpuctl.cli.cancel", "End a job after a last checkpoint."),
        "ckpt": Verb("gpuctl.cli.ckpt", "List, fetch, check or delete a job's checkpoints."),
    },
    "Nodes": {
        "ssh": Verb("gpuctl.cli.ssh", "Log in to a node, or run a command there on this terminal."),
        "exec": Verb("gpuctl.cli.exec", "Run a command on a node, or on all of them."),
        "cp": Verb("gpuctl.cli.cp", "Copy files to a node or from one."),
        "forward": Verb("gpuctl.cli.forward", "Bring a port of a node, or TensorBoard, to this machine."),
    },
    "Other": {
        "demo": Verb("gpuctl.cli.demo", "Train on four local nodes and lose two of them on the way."),
        "config": Verb("gpuctl.cli.config", "Show the settings and where each comes from."),
        "completion": Verb("gpuctl.cli.completion", "Print the completion script of a shell."),
    },
}
VERBS: dict[str, Verb] = {name: verb for section in SECTIONS.values() for name, verb in section.items()}


class Interrupted(GpuctlError):
    """Ctrl-C."""

    exit_code = 130


class ReaderLeft(Exception):
    """The pipe that standard output goes to was closed (``| head``)."""


class AsText:
    """For a command or a group: text reaches the verb as it is (see ``options``).

    Typer 0.29 would load pydantic for it, 0.1 s of CPU and a third of ``gpuctl status``, to turn text into text.
    """

    def get_params(self, ctx: Any) -> Any:
        params = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if hasattr(param, "_runtime_param") and param.type_descriptor.annotation in _TEXT:
                param._runtime_param = _AsIs()
        return params


_TEXT = (str, bool, list[str])


class _AsIs:
    """Takes the place of Typer's conversion."""

    def coerce(self, value: Any, **_: Any) -> Any:
        return value


class TextCommand(AsText, TyperCommand):
    """A verb."""


class TextGroup(AsText, TyperGroup):
    """A verb with verbs below it, such as ``ckpt``."""


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
                f"there is no verb {args[0]!r}", f"did you mean `gpuctl {near[0]}`?" if near else "see `gpuctl --help`"
            )
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Before Typer makes something of its own of them."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            raise Interrupted("interrupted") from error
        except BrokenPipeError as error:
            raise ReaderLeft from error

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        width = max(map(len, VERBS))
        for title, verbs in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), verb.about) for name, verb in verbs.items()])


def load(name: str) -> Any:
    """The command of one verb, from its module."""
    module = import_module(VERBS[name].module)
    app = getattr(module, "app", None) or single(
        getattr(module, "verb", None) or getattr(module, name), getattr(module, "COMMAND", TextCommand)
    )
    command = get_command(app)
    command.name = name
    return command


def single(function: Any, cls: type[TextCommand] = TextCommand) -> typer.Typer:
    """An app of one command, with the looks of all our commands."""
    app = new_app()
    app.command(cls=cls, context_settings=EVERYWHERE)(function)
    return app


def new_app(cls: type[TyperGroup] = TextGroup, **settings: Any) -> typer.Typer:
    """A Typer app with plain help: no boxes, no tracebacks of its own, no options that we do not know of."""
    return typer.Typer(
        cls=cls,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings=EVERYWHERE,
        **settings,
    )
