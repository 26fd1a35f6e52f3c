"""What a job's workers print, with a ``node/rank`` prefix; the bottom of a terminal has what is not a line yet."""

from __future__ import annotations

import os
import re
import shutil
import sys
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from gpuctl.cli.render.terminal import is_colourful, styled

_BAR_EVERY_S = 30.0
"""Between two states of a progress bar where there is no terminal."""
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_COLOURS = (36, 33, 35, 32, 34, 96, 93, 95)

Found = tuple[int, str, dict[str, Any]]
"""(round, node, line), as ``StreamReader`` reads it."""


@dataclass(slots=True)
class Printer:
    """Prints lines of logs, as text or as one JSON object each.

    Of a progress bar it shows what follows it; while nothing does, its state: at the bottom of the terminal if there is
    one, else in a line now and then. ``status`` stands below that, on a terminal only. ``clear`` before something else
    is printed, and ``finish`` in the end.
    """

    as_json: bool = False
    rank: int | None = None
    """Only this global rank."""
    live: bool = False
    """Lines are shown as they come."""
    _width: int = 0
    _bars: dict[tuple[int, str], str] = field(default_factory=dict)
    """By rank and node: the line that is not at its end yet."""
    _shown_at: dict[tuple[int, str], float] = field(default_factory=dict)
    _status: str = ""
    _drawn: bool = False
    """The cursor is at the beginning of what stands at the bottom."""

    def show(self, found: Iterable[Found]) -> None:
        """Print lines in order of time; nodes' clocks are close enough."""
        ordered = sorted(found, key=lambda item: (item[0], item[2].get("t", 0.0)))
        lines: list[str] = []
        for number, node, line in ordered:
            if self.rank is not None and line.get("rank") != self.rank:
                continue
            if self.as_json:
                lines.append(msgspec.json.encode({"round": number, "node": node, **line}).decode())
            elif not line.get("partial"):
                self._bars.pop((line.get("rank", 0), node), None)
                lines.append(self._told(node, line))
            else:
                lines.extend(self._bar(node, line))
        if ordered:
            self._write(lines)

    @property
    def has_status(self) -> bool:
        """Whether ``status`` shows anything."""
        return self.live and not self.as_json and _is_screen()

    def status(self, text: str) -> None:
        """Keep ``text`` as the last line of the terminal, from now on."""
        if self.has_status and (text != self._status or not self._drawn):
            self._status = text
            self._write([])

    def clear(self) -> None:
        """Take what is no line yet off the terminal."""
        if self._drawn:
            sys.stdout.write("\r\033[J")
            sys.stdout.flush()
            self._drawn = False

    def finish(self) -> None:
        """Show the bars that nothing has followed."""
        bars, self._bars, self._status = self._bars, {}, ""
        self._write([self._prefixed(node, rank, text) for (rank, node), text in sorted(bars.items())])

    def _write(self, lines: list[str]) -> None:
        """All in one piece, so that nothing flickers."""
        text = "\r\033[J" if self._drawn and lines else "\r" if self._drawn else ""
        text += "".join(f"{line}\n" for line in lines)
        bottom = self._bottom()
        if bottom:
            text += "\033[K\n".join(bottom) + "\033[J\r" + (f"\033[{len(bottom) - 1}A" if len(bottom) > 1 else "")
        elif self._drawn:
            text += "\033[J"
        self._drawn = bool(bottom)
        sys.stdout.write(text)
        sys.stdout.flush()

    def _bottom(self) -> list[str]:
        """The bar of the lowest rank, and the status."""
        if not self.has_status:
            return []
        columns = shutil.get_terminal_size().columns
        lines = []
        if self._bars:
            (rank, node), text = min(self._bars.items())
            before = self._prefixed(node, rank, "")
            room = columns - len(_ANSI.sub("", before)) - 1
            lines.append(before + _cut(_ANSI.sub("", text), room))
        if self._status:
            lines.append(styled(_cut(self._status, columns - 1), "dim"))
        return lines

    def _told(self, node: str, line: dict[str, Any]) -> str:
        rank = line.get("rank", 0)
        self._shown_at[rank, node] = line.get("t", 0.0)
        return self._prefixed(node, rank, _text(line))

    def _bar(self, node: str, line: dict[str, Any]) -> list[str]:
        rank = line.get("rank", 0)
        self._bars[rank, node] = _text(line)
        since = self._shown_at.setdefault((rank, node), line.get("t", 0.0))
        is_due = self.live and not _is_screen() and line.get("t", 0.0) - since >= _BAR_EVERY_S
        return [self._told(node, line)] if is_due else []

    def _prefixed(self, node: str, rank: int, text: str) -> str:
        prefix = f"{node}/{rank}"
        self._width = max(self._width, len(prefix))
        prefix = prefix.ljust(self._width)
        if is_colourful(sys.stdout):
            prefix = f"\033[{_COLOURS[rank % len(_COLOURS)]}m{prefix}\033[0m"
        return f"{prefix} | {text}"


def _text(line: dict[str, Any]) -> str:
    """A line's text; of a progress bar that redraws itself, only the last state."""
    return str(line.get("text", "")).rstrip("\r\n").rpartition("\r")[2]


def _cut(text: str, room: int) -> str:
    """What fits into so many columns, of which some characters take two."""
    for index, character in enumerate(text):
        room -= 2 if unicodedata.east_asian_width(character) in "WF" else 1
        if room < 0:
            return text[:index]
    return text


def _is_screen() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
