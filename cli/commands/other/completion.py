"""``gpuctl completion``: prints a shell's completion script."""

from __future__ import annotations

from typing import Annotated

import typer
from typer._completion_shared import get_completion_script

from gpuctl.cli.render.terminal import out
from gpuctl.cluster.errors import BadInput

_SHELLS = ("bash", "zsh", "fish")


def verb(shell: Annotated[str, typer.Argument(metavar="SHELL", help="bash, zsh or fish.")]) -> None:
    """Print a shell's completion script.

    bash: eval "$(gpuctl completion bash)"
    """
    if shell not in _SHELLS:
        raise BadInput(f"no completion for {shell!r}", f"use one of: {', '.join(_SHELLS)}")
    out(get_completion_script(prog_name="gpuctl", complete_var="_GPUCTL_COMPLETE", shell=shell))
