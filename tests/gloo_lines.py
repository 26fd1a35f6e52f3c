"""What gloo prints of itself, up to torch 2.9: a line for each group that a process joins."""

from __future__ import annotations

import re

_LINE = re.compile(r"(?m)^\[Gloo\] Rank \d+ is connected to .*\n")


def without_gloo(printed: str) -> str:
    """The rest."""
    return _LINE.sub("", printed)
