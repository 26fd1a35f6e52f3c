"""Commands whose text reaches them as it is, with plain help."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from gpuctl.cli.settings.options import refuse_unusable

EVERYWHERE: dict[str, Any] = {"help_option_names": ["-h", "--help"]}
"""Settings of every command."""


class AsText:
    """Mixin for a command or a group: text reaches the verb as it is (see ``options``), unless it is empty or not
    UTF-8.

    Typer 0.29 would load pydantic for it, 0.1 s of CPU and a third of ``gpuctl status``, to turn text into text.
    """

    def get_params(self, ctx: Any) -> Any:
        params = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if hasattr(param, "_runtime_param") and param.type_descriptor.annotation in _TEXT:
                param._runtime_param = _AsIs()
                param._custom_shell_complete = _offered
        return params


_TEXT = (str, bool, list[str])
CLUSTER = "gpuctl.cluster"
"""Of a context's ``meta``: the cluster that was named on the command line."""


class _AsIs:
    """Takes the place of Typer's conversion.

    Raises ``BadInput`` for an empty value: with an unset variable of a shell (``cancel "$JOB"``) nobody means the
    newest job. Only a script's own arguments may be empty.
    """

    def coerce(self, value: Any, *, param: Any, **_: Any) -> Any:
        name = _flag(param) or param.metavar.strip("[].")
        for text in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(text, str):
                refuse_unusable(name, text, may_be_empty=param.metavar == "ARGS", is_required=param.required)
        return value


def _offered(ctx: Any, param: Any, incomplete: str) -> list[str]:
    from gpuctl.cli.completions import offered

    words = offered(param.metavar or "", _flag(param), ctx.params)
    return [word for word in words if word.startswith(incomplete)]


def _flag(param: Any) -> str:
    """The flag of a parameter; empty for an argument."""
    return next((opt for opt in param.opts if opt.startswith("--")), "")


class TextCommand(AsText, TyperCommand):
    """A verb whose values are text."""

    def invoke(self, ctx: Any) -> Any:
        ctx.meta[CLUSTER] = ctx.params.get("cluster")  # all contexts share it
        return super().invoke(ctx)


class TextGroup(AsText, TyperGroup):
    """A verb with verbs below it, such as ``ckpt``."""


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
