"""``.gitignore`` as git reads it: one path at a time, the last pattern that matches decides.

Written here because pathspec (1.1) lets a pattern that matches a folder speak for what is inside of it, so that the
usual ``*``, ``!*/``, ``!*.py`` leaves out too much. A test compares this with git itself.

Source: gitignore(5), and git's wildmatch.c for the details.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

FILES = (".gitignore", ".gpuctlignore")
"""Of one folder; the later one decides. The latter is for what git is to know and nodes are not, or the reverse."""

_CLASSES = {
    "alnum": "a-zA-Z0-9",
    "alpha": "a-zA-Z",
    "blank": r" \t",
    "digit": "0-9",
    "lower": "a-z",
    "punct": r"!-/:-@\[-`{-~",
    "space": r"\s",
    "upper": "A-Z",
    "xdigit": "0-9a-fA-F",
}


@dataclass(frozen=True, slots=True)
class Pattern:
    """A line of an ignore file."""

    regex: re.Pattern[str]
    leaves_out: bool
    """``False`` for a line that begins with ``!``."""
    folders_only: bool
    whole_path: bool
    """It is matched against the path below the file's folder, and not against the last name of it."""


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of one ``.gitignore`` or ``.gpuctlignore`` of one folder."""

    folder: Path
    patterns: tuple[Pattern, ...]

    def verdict(self, path: Path, is_folder: bool) -> bool | None:
        """Whether ``path``, somewhere below, is left out; ``None`` if this file does not say."""
        name = path.relative_to(self.folder).as_posix()
        for pattern in reversed(self.patterns):
            subject = name if pattern.whole_path else path.name
            if (is_folder or not pattern.folders_only) and pattern.regex.fullmatch(subject):
                return pattern.leaves_out
        return None


def rules_of(folder: Path) -> tuple[Rules, ...]:
    """Those of ``folder``'s own files, the one that decides last; none if it has none."""
    files = [file for name in FILES if (file := folder / name).is_file()]
    return tuple(rules(folder, file.read_text(encoding="utf-8", errors="replace")) for file in files)


def rules(folder: Path, text: str) -> Rules:
    """Those that the lines of ``text`` would be in ``folder``."""
    return Rules(folder, tuple(pattern for line in text.split("\n") if (pattern := parse(line))))


def parse(line: str) -> Pattern | None:
    """``None`` for a comment, an empty line, and a pattern that can match nothing."""
    text = _without_trailing_spaces(line.removesuffix("\r"))
    if not text or text.startswith("#"):
        return None
    leaves_out = not text.startswith("!")
    text = text if leaves_out else text[1:]
    folders_only = text.endswith("/")
    text = text[:-1] if folders_only else text
    whole_path = "/" in text
    source = _translate(text.removeprefix("/"), whole_path)
    if not source:
        return None
    return Pattern(re.compile(source, re.DOTALL), leaves_out, folders_only, whole_path)


def _without_trailing_spaces(line: str) -> str:
    """Unless the last of them is escaped."""
    bare = line.rstrip(" ")
    backslashes = len(bare) - len(bare.rstrip("\\"))
    return bare + " " if len(bare) < len(line) and backslashes % 2 else bare


def _translate(text: str, whole_path: bool) -> str | None:
    """The regular expression; ``None`` if it is malformed."""
    any_one, any_many = ("[^/]", "[^/]*") if whole_path else (".", ".*")
    found = []
    at = 0
    while at < len(text):
        if double := _double_star(text, at) if whole_path else None:
            source, at = double
        elif text[at] == "*":
            source, at = any_many, at + 1
        elif text[at] == "?":
            source, at = any_one, at + 1
        elif text[at] == "[":
            parsed = _bracket(text, at + 1, whole_path)
            if parsed is None:
                return None
            source, at = parsed
        elif text[at] == "\\":
            if at + 1 == len(text):
                return None
            source, at = re.escape(text[at + 1]), at + 2
        else:
            source, at = re.escape(text[at]), at + 1
        found.append(source)
    return "".join(found)


def _double_star(text: str, at: int) -> tuple[str, int] | None:
    """``**`` as a whole path component: any number of folders. Elsewhere it is two single stars."""
    if not text.startswith("**", at) or (at > 0 and text[at - 1] != "/"):
        return None
    end = at
    while end < len(text) and text[end] == "*":
        end += 1
    if end == len(text):
        return ".*", end
    return ("(?:.*/)?", end + 1) if text[end] == "/" else None


def _bracket(text: str, at: int, whole_path: bool) -> tuple[str, int] | None:
    """The class that begins at ``at``, behind its bracket, and where the text goes on."""
    negated = text[at : at + 1] in ("!", "^")
    at += negated
    members = []
    first = True
    while first or text[at : at + 1] != "]":
        first = False
        if at >= len(text):
            return None
        if text.startswith("[:", at) and (end := text.find(":]", at)) > 0:
            if text[at + 2 : end] not in _CLASSES:
                return None
            members.append(_CLASSES[text[at + 2 : end]])
            at = end + 2
            continue
        low, at = _member(text, at)
        if text[at : at + 1] == "-" and text[at + 1 : at + 2] not in ("]", ""):
            high, at = _member(text, at + 1)
            if low <= high:  # an empty range matches nothing
                members.append(f"{re.escape(low)}-{re.escape(high)}")
        else:
            members.append(re.escape(low))
    if not members:
        nothing, anything = "(?!)", "[^/]" if whole_path else "."
        return (anything if negated else nothing), at + 1
    guard = "(?!/)" if whole_path else ""
    return f"{guard}[{'^' if negated else ''}{''.join(members)}]", at + 1


def _member(text: str, at: int) -> tuple[str, int]:
    if text[at] == "\\" and at + 1 < len(text):
        at += 1
    return text[at], at + 1
