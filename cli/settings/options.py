"""The options that several verbs share, and how their text is read.

Every value reaches a verb as text, and the verb (or ``settings``) makes something of it: so a flag, a variable and a
line of ``gpuctl.yaml`` are refused in the same words.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar

import typer

from gpuctl.cluster.errors import BadInput

T = TypeVar("T")


def text_option(*names: str, metavar: str, about: str) -> Any:
    return typer.Option(*names, metavar=metavar, help=about, show_default=False)


Cluster = Annotated[str | None, text_option("--cluster", "-c", metavar="NAME", about="Name of the cluster.")]
Bucket = Annotated[
    str | None,
    text_option("--bucket", metavar="URL", about="The cluster's bucket, if the cluster is not known here."),
]
Output = Annotated[str, text_option("--output", "-o", metavar="text|json", about="Output format.")]


def wants_json(output: str) -> bool:
    """Raises ``BadInput`` for an ``--output`` that is neither."""
    if output not in ("text", "json"):
        raise BadInput(f"--output {output} is not a format", "use text or json")
    return output == "json"


def refuse_unusable(name: str, text: str, *, may_be_empty: bool = False, is_required: bool = False) -> None:
    """Refuse a value that cannot be used.

    Args:
        name: of the flag, argument or variable, for the message.
        text: its value.
        may_be_empty: whether an empty value is no error.
        is_required: whether it cannot be left out, so that the hint does not offer that.

    Raises ``BadInput`` for a value that is empty or not UTF-8: jobs, settings and logs are JSON.
    """
    if not text and not may_be_empty:
        raise BadInput(f"{name} is empty", "give a value" + ("" if is_required else ", or leave it out"))
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raw = os.fsencode(text).decode(errors="backslashreplace")
        raise BadInput(f"{name} {raw} is not UTF-8", "write it in UTF-8, and rename files accordingly") from error


def parse_flag(flag: str, text: str | None, parse: Callable[[str], T]) -> T | None:
    """The value of a flag; ``None`` if it was not given. Raises ``BadInput`` with what ``parse`` complains of."""
    if text is None:
        return None
    try:
        return parse(text)
    except ValueError as error:
        raise refusal(f"{flag} {text}", error) from error


def refusal(where: str, error: ValueError) -> BadInput:
    """A parser's ``ValueError("is not …; use …")`` about the text at ``where``."""
    message, _, hint = str(error).partition("; ")
    return BadInput(f"{where} {message}", hint)


def whole_number(least: int) -> Callable[[str], int]:
    """Parses a number of ``least`` or more."""

    def parse(text: str) -> int:
        if not re.fullmatch(r"-?\d+", text.strip(), re.ASCII):
            raise ValueError(f"is not a whole number; use {least} or more")
        if int(text) < least:
            raise ValueError(f"is too few; use {least} or more")
        return int(text)

    return parse


def dollars(text: str) -> float:
    """Parses an amount of US dollars."""
    if not re.fullmatch(r"\$?\d+(\.\d+)?", text.strip(), re.ASCII):
        raise ValueError("is not an amount; use, for example, 12.50")
    return float(text.strip().removeprefix("$"))


def seconds(text: str) -> float:
    """Parses a number of seconds."""
    if not re.fullmatch(r"\d+(\.\d+)?", text.strip(), re.ASCII):
        raise ValueError("is not a number of seconds; use one such as 30, or 0")
    return float(text)


def refuse_unknown_stop_signal(env: Mapping[str, str]) -> None:
    """Raises ``BadInput`` if ``GPUCTL_STOP_SIGNAL`` is not a signal that workers can be asked to stop by."""
    from gpuctl.trainers.launchers.adapter import STOP_SIGNAL, is_stop_signal

    asked = env.get(STOP_SIGNAL)
    if asked is not None and not is_stop_signal(asked):
        raise BadInput(f"{STOP_SIGNAL}={asked} is not a signal to stop by", "use TERM, INT, USR1 or USR2")
