"""What a worker that failed has printed last, and how to tell it."""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuctl.cluster.worker_context import STDERR_MARK

_TAIL_BYTES = 64 * 1024
_CHARS = 8000
_MESSAGE_CHARS = 500
_LAST_LINES = 5
_TRACEBACK = "Traceback (most recent call last)"
_FATAL = "Fatal Python error: "
_FATAL_LOG = re.compile(r"F\d{4} [^\]]*\] (.+)")
_FRAME = re.compile(rb'  File ".*", line \d+ in ')
_RUNPY = re.compile(rb'  File "(<frozen runpy>|.*/runpy\.py)", line \d+ in ')
_STARTER = re.compile(rb'  File ".*/trainers/launchers/torchrun\.py", line \d+ in run_script')


@dataclass(frozen=True, slots=True)
class LastWords:
    """Why a worker failed, from its output. ``message`` is one line; ``text`` is all that is worth repeating, ending
    with it or beginning."""

    message: str = ""
    text: str = ""
    at: float = 0.0
    """When it was written, in seconds since the epoch."""


def signal_name(exit_code: int) -> str:
    """The name of the signal that ended a process, from its exit code as a shell reports it; empty if none did.

    >>> signal_name(139), signal_name(3)
    ('SIGSEGV', '')
    """
    try:
        return signal.Signals(exit_code - 128).name if exit_code > 128 else ""
    except ValueError:
        return ""


def last_words(paths: Iterable[Path], by_signal: bool = False) -> LastWords:
    """The reason for a worker's failure, from the files its output went to. ``by_signal``: a signal ended it, and not
    an exception."""
    lines: list[bytes] = []
    at = 0.0
    for path in paths:
        with contextlib.suppress(OSError), path.open("rb") as file:
            size = path.stat().st_size
            if not size:
                continue
            at = max(at, path.stat().st_mtime)
            file.seek(max(0, size - _TAIL_BYTES))
            lines += FaultTrimmer().feed(file.read().splitlines(), last=True)
    said = _fatal(lines) or _aborted(lines) if by_signal else _exception(lines)
    message, text = said or _end_of(lines)
    return LastWords(message[:_MESSAGE_CHARS], text[:_CHARS], at)


class FaultTrimmer:
    """Removes from ``faulthandler``'s output the frames that started the script: 40 lines, always the same.

    Fed with the lines of one file as they come; with ``last`` it keeps none back.
    """

    def __init__(self) -> None:
        self._held: list[bytes] = []
        self._skips = False

    def feed(self, lines: Iterable[bytes], *, last: bool = False) -> list[bytes]:
        found: list[bytes] = []
        for line in lines:
            if not _FRAME.match(line):
                self._skips = False
            elif self._skips:
                continue
            elif _STARTER.match(line):
                self._skips = True
                self._held.clear()
                continue
            elif _RUNPY.match(line):
                self._held.append(line)
                continue
            found += [*self._held, line]
            self._held.clear()
        if last:
            found += self._held
            self._held.clear()
        return found


def _fatal(lines: Sequence[bytes]) -> tuple[str, str] | None:
    """The message of Python's own fault handler."""
    text = [_plain(line) for line in lines]
    start = max((i for i, line in enumerate(text) if line.startswith(_FATAL)), default=None)
    if start is None:
        return None
    told = [line for line in text[start:] if not line.startswith("Extension modules: ")]
    return text[start], "\n".join(told).strip()


def _aborted(lines: Sequence[bytes]) -> tuple[str, str] | None:
    """What C++ said before it aborted, as JAX's and TensorFlow's does (abseil, glog): ``F1125 16:16:37 …] why``."""
    told = [found for line in lines if (found := _FATAL_LOG.match(_plain(line)))]
    return (told[-1][1], told[-1][1]) if told else None


def _exception(lines: Sequence[bytes]) -> tuple[str, str] | None:
    """The last traceback. What was printed to stdout after it is no part of it, where that can be told."""
    start = max((i for i, line in enumerate(lines) if _TRACEBACK.encode() in line), default=None)
    if start is None:
        return None
    marked = STDERR_MARK in lines[start]
    told = [_plain(line) for line in lines[start:] if not marked or STDERR_MARK in line]
    message = next((line for line in told[1:] if line and not line[0].isspace()), told[-1])
    return message, "\n".join(told).strip()


def _end_of(lines: Sequence[bytes]) -> tuple[str, str]:
    to_stderr = [line for line in lines if STDERR_MARK in line]
    told = [text for line in to_stderr or lines if (text := _plain(line))][-_LAST_LINES:]
    return (told[-1] if told else ""), "\n".join(told)


def _plain(line: bytes) -> str:
    return shown(line).decode(errors="replace").rstrip()


def shown(line: bytes) -> bytes:
    """A line as a terminal would show it: without marks, and of a bar that redraws itself its last state."""
    *_, text = [part for part in line.replace(STDERR_MARK, b"").split(b"\r") if part] or [b""]
    return text
