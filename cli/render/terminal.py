"""Output to the terminal: data on stdout, progress on stderr; colours and bars only on a terminal, and never with
NO_COLOR."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TextIO

import msgspec

_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}
_LEAST_WIDTH = 8
_BAR_BYTES = 1_000_000
_STATES = {
    "live": "green",
    "running": "green",
    "succeeded": "green",
    "new": "cyan",
    "leaving": "yellow",
    "queued": "cyan",
    "waiting": "yellow",
    "draining": "yellow",
    "cancelling": "yellow",
    "cancelled": "yellow",
    "silent": "red",
    "lost": "red",
    "ended": "red",
    "failed": "red",
}


class ProgressBar(Protocol):
    """A progress bar; call it with the amount done since the last call."""

    def __call__(self, amount: int) -> None: ...


def out(line: str = "") -> None:
    """Print a line of data to standard output."""
    sys.stdout.write(line + "\n")


def out_json(value: Any) -> None:
    out(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def say(line: str) -> None:
    """A line of progress, for a person. Where it cannot be written, the work goes on all the same."""
    try:
        sys.stderr.write(line + "\n")
        sys.stderr.flush()
    except OSError:
        give_up(sys.stderr)


def give_up(stream: TextIO) -> None:
    """Nobody reads it any more, or there is no room: what is still buffered goes nowhere, so that Python does not
    complain of it at the end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def event(line: str) -> None:
    """Something that happened to a job, among its output."""
    say(styled(f"· {line}", "dim", sys.stderr))


def fail(line: str) -> None:
    say(f"{styled('error:', 'red', sys.stderr)} {line}")


def can_ask() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()


def confirm(question: str) -> bool:
    """Ask on the terminal; ``False`` where there is nobody to ask."""
    if not can_ask():
        return False
    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def styled(text: str, style: str | None, stream: TextIO | None = None) -> str:
    if not style or not is_colourful(stream or sys.stdout):
        return text
    return f"\033[{_CODES[style]}m{text}\033[0m"


def is_colourful(stream: TextIO) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def fitting(header: Sequence[str], rows: Sequence[Sequence[str]], less: Sequence[int]) -> list[int]:
    """The columns of a table that are shown: all but, on a terminal, as many of ``less`` as it takes, in that order,
    that no line wraps."""
    shown = list(range(len(header)))
    widths = [max(len(row[i]) for row in (header, *rows)) for i in shown]
    room = shutil.get_terminal_size().columns
    for i in less if sys.stdout.isatty() else ():
        if sum(widths[j] for j in shown) + 2 * (len(shown) - 1) > room:
            shown.remove(i)
    return shown


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, give: Sequence[int] = ()) -> list[str]:
    """Aligned lines. On a terminal, the columns ``give`` are cut in turn so that no line wraps. Numbers stand right."""
    cells = [list(header), *(list(row) for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    over = sum(widths) + 2 * (len(widths) - 1) - shutil.get_terminal_size().columns
    for i in give if sys.stdout.isatty() else ():
        cut = max(0, min(over, widths[i] - max(len(header[i]), _LEAST_WIDTH)))
        widths[i] -= cut
        over -= cut
    columns = [[row[i] for row in rows] for i in range(len(header))]
    right = [any(map(_is_number, texts)) and all(t == "-" or _is_number(t) for t in texts) for texts in columns]
    lines = []
    for number, row in enumerate(cells):
        parts = [_cell(text, width, r, head=number == 0) for text, width, r in zip(row, widths, right, strict=True)]
        lines.append("  ".join(parts).rstrip())
    return lines


def _cell(text: str, width: int, right: bool, *, head: bool) -> str:
    cut = text if len(text) <= width else text[: width - 1] + "…"
    padded = cut.rjust(width) if right else cut.ljust(width)
    return styled(padded, "bold") if head else padded.replace(cut, styled(cut, _STATES.get(cut)), 1) if cut else padded


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).replace("e-", "", 1).isdigit()


@contextmanager
def bar(what: str, total: int) -> Iterator[ProgressBar]:
    """A progress bar over ``total`` bytes on a terminal, if they are many; a line at the end otherwise."""
    if not sys.stderr.isatty() or total < _BAR_BYTES:
        yield lambda amount: None  # noqa: ARG005
        say(f"{what}: {size(total)}")
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(what, total=total)
        yield lambda amount: progress.update(task, advance=amount)


# -- words for numbers ------------------------------------------------------------------------------------------------


def size(count: float) -> str:
    """Format bytes with decimal units.

    >>> size(12_400_000)
    '12.4 MB'
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def ago(at: float, now: float | None = None) -> str:
    """A wall-clock moment as seen from now; ``-`` for none.

    >>> ago(100.0, now=163.0)
    '1 min ago'
    """
    if not at:
        return "-"
    seconds = max(0.0, (time.time() if now is None else now) - at)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{int(seconds // length)} {unit} ago"
    return f"{int(seconds)} s ago"


def number(value: float | None) -> str:
    """Four significant digits; ``-`` for none."""
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.4g}"


def count(amount: int, what: str) -> str:
    """
    >>> count(1, "node"), count(3, "node")
    ('1 node', '3 nodes')
    """
    return f"{amount} {what}" + ("" if amount == 1 else "s")
