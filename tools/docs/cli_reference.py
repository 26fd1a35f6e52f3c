"""The reference of the command line, from the commands themselves: what ``--help`` prints, as Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from typer.main import get_command

from gpuctl.cli.app import app
from gpuctl.cli.verbs import SECTIONS

EVERYWHERE = "help"
"""An option of every command, which its own page need not repeat."""


def as_markdown() -> str:
    """All verbs, in the sections of ``gpuctl --help``."""
    return "\n\n".join(_sections())


def _sections() -> Iterator[str]:
    root = get_command(app).make_context("gpuctl", [], resilient_parsing=True)
    for title, verbs in SECTIONS.items():
        yield f"## {title}"
        for name in verbs:
            for path, context in _family(name, root):
                yield from _command(path, context)


def _family(name: str, parent: Any) -> Iterator[tuple[str, Any]]:
    """The command ``name`` below ``parent``, and those below it."""
    command = parent.command.get_command(parent, name)
    context = command.make_context(name, [], parent=parent, resilient_parsing=True)
    path = f"{_path(parent)} {name}"
    yield path, context
    for below in command.list_commands(context) if hasattr(command, "list_commands") else ():
        yield from _family(below, context)


def _path(context: Any) -> str:
    return context.info_name if context.parent is None else f"{_path(context.parent)} {context.info_name}"


def _command(path: str, context: Any) -> Iterator[str]:
    command = context.command
    yield f"{'#' * (len(path.split()) + 1)} `{path}`"
    yield f"```text\n{' '.join([path, *map(_piece, command.collect_usage_pieces(context))])}\n```"
    yield _prose(command.help or "")
    params = command.get_params(context)
    rows = {kind: [_row(p, context) for p in params if _kind(p) == kind] for kind in ("argument", "option")}
    for kind, head in (("argument", "Argument"), ("option", "Option")):
        if rows[kind]:
            yield "\n".join((f"| {head} | |", "|---|---|", *rows[kind]))


def _piece(piece: str) -> str:
    """A part of the usage: ``NODE``, ``STEP...``, ``[JOB]``; Typer has ``{NODE}``, ``{STEP...}...``, ``[[JOB]]``."""
    return re.sub(r"^(?:\{(\w+(?:\.{3})?)\}(?:\.{3})?|\[(\[\w+\])\])$", lambda found: found[1] or found[2], piece)


def _kind(param: Any) -> str:
    """``argument`` or ``option``; empty for what every command has."""
    return "" if param.name == EVERYWHERE else str(param.param_type_name)


def _row(param: Any, context: Any) -> str:
    names, about = param.get_help_record(context)
    if _kind(param) == "argument":  # whether it may be left out stands in the usage
        names, about = param.metavar.strip("[]"), about.replace("[required]", "").rstrip()
    about = re.sub(r"\.?\s+\[default: \(?(.*?)\)?\]$", r" (default: \1).", about)
    if isinstance(param.default, str) and "(default: " not in about:
        about = f"{about.rstrip('.')} (default: {param.default})."
    return f"| `{names}` | {_prose(about)} |"


_LITERAL = re.compile(
    r"(`[^`]*`)"  # is code already
    r"|(?<![\w`/$-])(--?[a-z][a-z-]*(?![\w])|~?/[\w./~-]*\w|\$?[A-Z][A-Z_]*_[A-Z_]+|\*?\.[a-z]+[/\w]*)(?!\w)"
)


def _prose(text: str) -> str:
    """Help text as Markdown: what stands for itself there, such as ``--dry-run`` or ``*.pem``, becomes code."""
    return _LITERAL.sub(lambda found: found[1] or f"`{found[2]}`", text).replace("|", "\\|")
