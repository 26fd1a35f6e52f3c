"""A verb's line that ends with ``-- CMD``."""

from __future__ import annotations

from typing import Any

import typer

from gpuctl.cli.text_commands import TextCommand

_WORDS = "gpuctl.words"


class WithCommand(TextCommand):
    """A verb whose command line ends with ``-- CMD``: what stands after the first ``--`` reaches it as it is."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        before, dashes, after = _split(args)
        ctx.meta[_WORDS] = after if dashes else None
        parsed: list[str] = super().parse_args(ctx, before)
        return parsed

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- CMD ...]"]


def words_of(ctx: typer.Context) -> list[str] | None:
    """The words after ``--``; ``None`` if there was no ``--``."""
    found: list[str] | None = ctx.meta[_WORDS]
    return found


def _split(args: list[str]) -> tuple[list[str], bool, list[str]]:
    if "--" not in args:
        return args, False, []
    at = args.index("--")
    return args[:at], True, args[at + 1 :]
