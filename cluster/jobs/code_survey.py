"""What of the working folder is sent along: all of it but what ``.gitignore`` files and ``.gpuctlignore`` name."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

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


def survey(folder: Path, limit: int = LIMIT_BYTES) -> list[Item]:
    """What would be packed: see ``look_over``."""
    return look_over(folder, limit).items


def look_over(folder: Path, limit: int = LIMIT_BYTES, apart: Path | None = None) -> Survey:
    """What would be packed: all of ``folder`` but what ``.gitignore`` and ``.gpuctlignore`` files, ``NEVER_PACKED`` and
    ``private_files`` leave out. ``apart``: a folder that is never packed either, absolute.

    Raises ``BadInput`` over ``limit`` bytes (naming the largest files) and for a link that points outside.
    """
    root = folder.resolve()
    walk = _Walk(root, apart)
    items = sorted(walk.below(root, _rules_above(root)), key=lambda item: item.name)
    total = sum(item.size for item in items)
    if total > limit:
        largest = sorted(items, key=lambda item: -item.size)[:5]
        names = ", ".join(f"{item.name} ({_megabytes(item.size)})" for item in largest if item.size)
        raise BadInput(
            f"the folder {root} holds {_megabytes(total)}, more than the limit of {_megabytes(limit)}; "
            f"the largest files: {names}",
            "exclude what the script does not need in .gitignore or .gpuctlignore",
        )
    return Survey(items, sorted(walk.private))


class _Walk:
    def __init__(self, root: Path, apart: Path | None) -> None:
        self._root = root
        self._apart = apart
        self._secrets = secrets_in(root)
        self.private: list[str] = []

    def below(self, folder: Path, rules: tuple[Rules, ...]) -> Iterator[Item]:
        rules = (*rules, *rules_of(folder))
        try:
            entries = list(os.scandir(folder))
        except OSError as error:
            raise BadInput(f"cannot read {folder}: {error.strerror}", "fix it, or exclude it in .gitignore") from error
        for entry in entries:
            path = Path(entry.path)
            is_folder = entry.is_dir(follow_symlinks=False)
            if entry.name in NEVER_PACKED or self._is_left_out(path, is_folder, rules):
                continue
            info = entry.stat(follow_symlinks=False)
            name = path.relative_to(self._root).as_posix()
            if entry.is_symlink():
                yield Item(name, path, 0, info.st_mode, _link_inside(self._root, path, name))
            elif is_folder:
                yield Item(name, path, 0, info.st_mode)
                yield from self.below(path, rules)
            elif entry.is_file(follow_symlinks=False):
                yield Item(name, path, info.st_size, info.st_mode)
            # sockets, pipes and devices are nobody's code

    def _is_left_out(self, path: Path, is_folder: bool, rules: tuple[Rules, ...]) -> bool:
        verdict = _verdict(path, is_folder, rules)
        if verdict is None and (path == self._apart or self._secrets.verdict(path, is_folder)):
            self.private.append(path.relative_to(self._root).as_posix() + ("/" if is_folder else ""))
            return True
        return path == self._apart or bool(verdict)


def _verdict(path: Path, is_folder: bool, rules: tuple[Rules, ...]) -> bool | None:
    """The innermost file with an opinion decides. A folder that is left out is never looked into."""
    verdicts = (rule.verdict(path, is_folder) for rule in reversed(rules))
    return next((verdict for verdict in verdicts if verdict is not None), None)


def _rules_above(root: Path) -> tuple[Rules, ...]:
    """Those of the folders between ``root`` and the top of its git work tree, unless they leave out ``root`` itself."""
    above = list(root.parents)
    top = next((i for i, folder in enumerate([root, *above]) if (folder / ".git").exists()), 0)
    rules = tuple(rule for folder in reversed(above[:top]) for rule in rules_of(folder))
    return () if any(_verdict(p, True, rules) for p in (root, *above[: max(0, top - 1)]) if rules) else rules


def _link_inside(root: Path, path: Path, name: str) -> str:
    target = Path(os.path.normpath(path.parent / path.readlink()))
    try:
        path.stat()
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise BadInput(f"the link {name} leads back to itself", "delete it, or exclude it in .gitignore") from error
    if not target.is_relative_to(root) or not path.resolve().is_relative_to(root):
        raise BadInput(
            f"the link {name} points outside of the folder, to {path.readlink()}",
            "copy what it points to, or exclude it in .gitignore",
        )
    if target.resolve() != path.resolve():  # '..' behind a link does not lead back to where the link is
        target = path.resolve()
    return Path(os.path.relpath(target, path.parent)).as_posix()


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.0f} MB" if size >= 1e7 else f"{size / 1e6:.1f} MB"
