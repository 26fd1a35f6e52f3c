"""What a failed test adds to its report: the last lines that its processes wrote. One red run is then enough."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

_LINES = 20
_FILES = 12
"""As many of those written last."""
_LOOKED_AT = 20_000
"""Files: a test may have made a whole file system."""
_LOGS = ("*.log", "console", "stdout", "stderr")


def sections(error: BaseException | None, folder: Path | None) -> Iterator[tuple[str, str]]:
    """Titles and texts for the report of a test.

    Args:
        error: with which it failed; of one about a program that was run, what that program said is told.
        folder: the test's own, if it has one: the logs there are told.
    """
    seen = set()
    while error is not None and id(error) not in seen:  # what was raised from what
        seen.add(id(error))
        command = getattr(error, "cmd", None)
        for name in ("stdout", "stderr"):
            said = getattr(error, name, None)
            if command and said:
                yield (
                    f"{name} of {_shown(command)}",
                    _end(said.decode(errors="replace") if isinstance(said, bytes) else said),
                )
        error = error.__cause__ or error.__context__
    if folder is not None:
        for path in _logs(folder):
            yield f"end of {path.relative_to(folder)}", _end(_tail(path))


def _logs(folder: Path) -> list[Path]:
    found = []
    # Unlike a glob, a walk passes over what cannot be looked into, such as a path too long to be named.
    files = (Path(above, name) for above, _, names in os.walk(folder) for name in names)
    for path in islice(files, _LOOKED_AT):
        try:
            if any(path.match(pattern) for pattern in _LOGS) and path.is_file() and not path.is_symlink():
                found.append((path.stat(), path))
        except OSError:
            continue
    newest = sorted(((state.st_mtime, path) for state, path in found if state.st_size), reverse=True)[:_FILES]
    return [path for _, path in newest]


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 200 * _LINES))
            return file.read().decode(errors="replace")
    except OSError as error:
        return str(error)


def _end(text: str) -> str:
    return "\n".join(text.splitlines()[-_LINES:])


def _shown(command: object) -> str:
    words = [str(word) for word in command] if isinstance(command, list | tuple) else [str(command)]
    return " ".join(words)[:120]
