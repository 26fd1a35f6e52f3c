"""``gpuctl completion``"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer
from typer._completion_shared import get_completion_script

from gpuctl.cli.terminal import out


class Shell(StrEnum):
    bash = "bash"
    zsh = "zsh"
    fish = "fish"


def verb(shell: Annotated[Shell, typer.Argument(metavar="SHELL", help="bash, zsh or fish.")]) -> None:
    """Print the completion script of a shell.

    bash: eval "$(gpuctl completion bash)"
    """
    out(get_completion_script(prog_name="gpuctl", complete_var="_GPUCTL_COMPLETE", shell=shell.value))
