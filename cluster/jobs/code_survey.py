"""What of a folder is sent along: all of it but what ``.gitignore`` files and ``.gpuctlignore`` name, or Docker's."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gpuctl.cluster.errors import BadInput
from gpuctl.cluster.jobs.gitignore import Rules, rules_of
from gpuctl.cluster.jobs.private_files import secrets_in

LIMIT_BYTES = 500_000_000
"""Of the files before compression: beyond it something is in the folder that is not code."""
NEVER_PACKED = frozenset({".git", "__pycache__", ".venv"})


@dataclass(frozen=True, slots=True)
class Item:
    """One file, folder or link to pack. ``name`` is relative, with forward slashes."""

    name: str
    path: Path
    size: int
    mode: int
    link: str | None = None
    """Target of a symbolic link, relative to the folder that holds it."""

    @property
    def is_folder(self) -> bool:
        return self.link is None and stat.S_ISDIR(self.mode)


@dataclass(frozen=True, slots=True)
class Survey:
    """The files in a folder, by name."""

    items: list[Item]
    private: list[str]
    """Files and folders that would be packed if they did not hold secrets (see ``private_files``)."""


class Ignore(Protocol):
    """The rules by which files are left out, as they are in one folder."""

    @property
    def hint(self) -> str:
        """What to do about a file that cannot be sent."""
        ...

    def below(self, folder: Path) -> Ignore:
        """The rules for what is in ``folder``."""
        ...

    def verdict(self, path: Path, is_folder: bool) -> bool | None:
        """Whether ``path`` is left out; ``None`` if no rule says."""
        ...

    def may_hold(self, folder: Path) -> bool:
        """Whether something in ``folder``, which is left out, may be sent."""
        ...


def survey(folder: Path, limit: int = LIMIT_BYTES) -> list[Item]:
    """What would be packed: see ``look_over``."""
    return look_over(folder, limit).items


def look_over(
    folder: Path, limit: int = LIMIT_BYTES, apart: Path | None = None, ignore: Ignore | None = None
) -> Survey:
    """What would be packed: all of ``folder`` but what ``ignore``, ``NEVER_PACKED`` and ``private_files`` leave out.

    Args:
        folder: the folder.
        limit: bytes that it may hold.
        apart: a folder that is never packed either, absolute.
        ignore: what is left out; by default what ``.gitignore`` and ``.gpuctlignore`` files say.

    Raises ``BadInput`` over ``limit`` (naming the largest files) and for a link that points outside.
    """
    root = folder.resolve()
    rules = ignore or _GitIgnore(_rules_above(root))
    walk = _Walk(root, apart, rules.hint)
    items = sorted(walk.below(root, rules), key=lambda item: item.name)
    total = sum(item.size for item in items)
    if total > limit:
        largest = sorted(items, key=lambda item: -item.size)[:5]
        names = ", ".join(f"{item.name} ({_megabytes(item.size)})" for item in largest if item.size)
        raise BadInput(
            f"the folder {root} holds {_megabytes(total)}, more than the limit of {_megabytes(limit)}; "
            f"the largest files: {names}",
            rules.hint.replace("exclude it", "exclude what the script does not need"),
        )
    return Survey(items, sorted(walk.private))


@dataclass(frozen=True, slots=True)
class _GitIgnore:
    """See ``Ignore``; the innermost file with an opinion decides. A folder that is left out is never looked into."""

    rules: tuple[Rules, ...]
    hint: str = "exclude it in .gitignore or .gpuctlignore"

    def below(self, folder: Path) -> _GitIgnore:
        return _GitIgnore((*self.rules, *rules_of(folder)))

    def verdict(self, path: Path, is_folder: bool) -> bool | None:
        return _verdict(path, is_folder, self.rules)

    def may_hold(self, folder: Path) -> bool:  # noqa: ARG002
        return False


class _Walk:
    def __init__(self, root: Path, apart: Path | None, hint: str) -> None:
        self._root = root
        self._apart = apart
        self._hint = hint
        self._secrets = secrets_in(root)
        self.private: list[str] = []

    def below(self, folder: Path, rules: Ignore) -> Iterator[Item]:
        rules = rules.below(folder)
        try:
            entries = list(os.scandir(folder))
        except OSError as error:
            raise BadInput(f"cannot read {folder}: {error.strerror}", f"fix it, or {self._hint}") from error
        for entry in entries:
            path = Path(entry.path)
            is_folder = entry.is_dir(follow_symlinks=False)
            if entry.name in NEVER_PACKED or self._is_apart(path, is_folder, rules):
                continue
            if rules.verdict(path, is_folder):
                if is_folder and rules.may_hold(path):
                    yield from self.below(path, rules)
                continue
            info = entry.stat(follow_symlinks=False)
            name = path.relative_to(self._root).as_posix()
            if entry.is_symlink():
                yield Item(name, path, 0, info.st_mode, _link_inside(self._root, path, name, self._hint))
            elif is_folder:
                yield Item(name, path, 0, info.st_mode)
                yield from self.below(path, rules)
            elif entry.is_file(follow_symlinks=False):
                yield Item(name, path, info.st_size, info.st_mode)
            # sockets, pipes and devices are nobody's code

    def _is_apart(self, path: Path, is_folder: bool, rules: Ignore) -> bool:
        """Whether ``path`` stays although no rule says so, or whatever the rules say."""
        if path != self._apart and not self._secrets.verdict(path, is_folder):
            return False
        is_told = rules.verdict(path, is_folder) is None
        if is_told:
            self.private.append(path.relative_to(self._root).as_posix() + ("/" if is_folder else ""))
        return is_told or path == self._apart


def _verdict(path: Path, is_folder: bool, rules: tuple[Rules, ...]) -> bool | None:
    verdicts = (rule.verdict(path, is_folder) for rule in reversed(rules))
    return next((verdict for verdict in verdicts if verdict is not None), None)


def _rules_above(root: Path) -> tuple[Rules, ...]:
    """Those of the folders between ``root`` and the top of its git work tree, unless they leave out ``root`` itself."""
    above = list(root.parents)
    top = next((i for i, folder in enumerate([root, *above]) if (folder / ".git").exists()), 0)
    rules = tuple(rule for folder in reversed(above[:top]) for rule in rules_of(folder))
    return () if any(_verdict(p, True, rules) for p in (root, *above[: max(0, top - 1)]) if rules) else rules


def _link_inside(root: Path, path: Path, name: str, hint: str) -> str:
    target = Path(os.path.normpath(path.parent / path.readlink()))
    try:
        path.stat()
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise BadInput(f"the link {name} leads back to itself", f"delete it, or {hint}") from error
    if not target.is_relative_to(root) or not path.resolve().is_relative_to(root):
        raise BadInput(
            f"the link {name} points outside of the folder, to {path.readlink()}",
            f"copy what it points to, or {hint}",
        )
    if target.resolve() != path.resolve():  # '..' behind a link does not lead back to where the link is
        target = path.resolve()
    return Path(os.path.relpath(target, path.parent)).as_posix()


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.0f} MB" if size >= 1e7 else f"{size / 1e6:.1f} MB"
