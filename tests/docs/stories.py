"""What a page of the docs tells its reader to do: its fenced blocks, and the commands in them."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

from tests.paths import ROOT

_FENCE = re.compile(r"^(?P<in> *)```(?P<info>[^\n`]*)\n(?P<text>.*?)^(?P=in)```$", re.MULTILINE | re.DOTALL)
_SHELLS = ("", "bash", "console")
_RUNS = re.compile(r"(?!.*[─▶◀])(^|&& |\| |\$\()(gpuctl |python \S+\.py)|^(mkdir|printf) ")
"""Lines of a shell that are carried out: all with gpuctl in them, scripts, and what prepares those; no drawings."""


@dataclass(frozen=True)
class Command:
    line: str
    said: tuple[str, ...] = ()
    """The lines that the page shows as its output, in a ``console`` block; ``…`` stands for anything."""

    @property
    def exit_code(self) -> int:
        """0, unless its comment says that it ``exits 1``."""
        told = re.search(r"#.*\bexits (\d+)", self.line)
        return int(told[1]) if told else 0


@dataclass(frozen=True)
class Block:
    language: str
    title: str
    """Of a file: its name."""
    text: str
    is_elsewhere: bool
    """Whether the text before it says "in another terminal": what the block before has started goes on."""

    @property
    def commands(self) -> list[Command]:
        if self.language not in _SHELLS or self.title:
            return []
        lines = re.sub(r"\\\n\s*", "", self.text).splitlines()
        if self.language != "console":
            return [Command(line) for line in lines if _RUNS.search(line)]
        told = [line for line in lines if line.strip()]
        starts = [n for n, line in enumerate(told) if line.startswith("$ ")]
        ends = [*starts[1:], len(told)]
        found = [Command(told[at][2:], tuple(told[at + 1 : end])) for at, end in zip(starts, ends, strict=True)]
        return [one for one in found if _RUNS.search(one.line)]


def pages() -> list[str]:
    """All that have a command or a script of a guide, by their paths from the repository's root."""
    paths = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    names = [str(path.relative_to(ROOT)) for path in paths]
    return [name for name in names if any(one.commands for one in blocks(name))]


def blocks(page: str) -> list[Block]:
    text = Path(ROOT / page).read_text()
    found, end = [], 0
    for fence in _FENCE.finditer(text):
        language, _, more = fence["info"].strip().partition(" ")
        title = re.search(r'title="([^"]+)"', more)
        is_elsewhere = "another terminal" in " ".join(text[end : fence.start()].split())
        found.append(Block(language, title[1] if title else "", textwrap.dedent(fence["text"]), is_elsewhere))
        end = fence.end()
    return found
