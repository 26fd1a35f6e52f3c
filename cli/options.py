"""The options that several verbs share. Values of settings stay text, so that every source is refused in one way."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer


class Format(StrEnum):
    """How a verb that reads prints what it found."""

    text = "text"
    json = "json"


def text_option(*names: str, metavar: str, about: str) -> Any:
    return typer.Option(*names, metavar=metavar, help=about, show_default=False)


Cluster = Annotated[str | None, text_option("--cluster", "-c", metavar="NAME", about="Name of the cluster.")]
Bucket = Annotated[
    str | None,
    text_option("--bucket", metavar="URL", about="The cluster's bucket, if it is not known on this machine."),
]
Output = Annotated[Format, typer.Option("--output", "-o", help="How to print it.", show_default=False)]
