"""The file that says which packages a script needs: found in the working folder, and read as far as that goes without
an index. The nodes make of it what their platform wants (``bootstrap.environments``)."""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from gpuctl.cluster import distribution
from gpuctl.cluster.environments import conda_file
from gpuctl.cluster.errors import BadInput
from gpuctl.cluster.records.environments import EnvironmentKind, EnvironmentSource

NONE = "none"
"""As ``--environment``: whatever lies in the folder, the node's own packages are all."""
USUAL = ("uv.lock", "pylock.toml", "requirements.txt", "environment.yml")
"""Names that are looked for, in this order."""
UV_SETTINGS = "uv.toml"
"""uv's settings, beside the file: its indexes, for example."""
_PROJECT = "pyproject.toml"
_INCLUDE = re.compile(r"(?:-r|--requirement|-c|--constraint)(?:\s+|=|(?=[^-\s]))(.+)")
_INDEX = re.compile(r"(?:-i|--index-url|--extra-index-url)(?:\s+|=)(\S+)")
_IS_HERE = re.compile(r"(-e|--editable)\b|\.{0,2}/|\.{1,2}$|file:|[A-Za-z]:\\")
_HERE = "packages from folders are not installed; the working folder itself is where the script runs"


@dataclass(frozen=True, slots=True)
class FoundSource:
    """A source with what is said of it, and sent with it."""

    source: EnvironmentSource
    files: tuple[str, ...]
    """All that must come to the nodes, relative to the working folder."""
    packages: int
    """How many are named."""


def find(folder: Path, choice: str | None = None) -> FoundSource | None:
    """The source for a job that runs in ``folder``.

    Args:
        choice: a file below the folder, or ``none``; ``None``: the first of ``USUAL`` that is there.

    Raises ``BadInput`` for a file that is not there, or that cannot be used whatever the nodes are.
    """
    if choice == NONE:
        return None
    if choice is None:
        name = next((name for name in USUAL if _counts(folder, name)), None)
        return None if name is None else _read(folder, name)
    path = folder / choice
    if not path.is_file():
        there = ", ".join(name for name in USUAL if (folder / name).is_file())
        raise BadInput(
            f"environment file {choice} does not exist",
            f"use one of: {there}, none" if there else "name a requirements.txt, or leave it out",
        )
    if not path.resolve().is_relative_to(folder.resolve()):
        raise BadInput(f"{choice} is outside the working folder, and only that is copied to the nodes", "move it there")
    return _read(folder, path.resolve().relative_to(folder.resolve()).as_posix())


def kind_of(name: str) -> EnvironmentKind:
    """The kind of a file by its name, as uv and pip have it. Raises ``BadInput`` for any other."""
    base = PurePosixPath(name).name
    if base == "uv.lock":
        return "uv.lock"
    if re.fullmatch(r"pylock(\.[^.]+)?\.toml", base):
        return "pylock"
    if base.endswith((".txt", ".in")):
        return "requirements"
    if base.endswith((".yml", ".yaml")):
        return "conda"
    raise BadInput(
        f"{name} is not an environment file", "use a uv.lock, pylock.toml, requirements.txt or environment.yml"
    )


def _counts(folder: Path, name: str) -> bool:
    """A ``uv.lock`` without its project is nothing that uv would use."""
    return (folder / name).is_file() and (name != "uv.lock" or (folder / _PROJECT).is_file())


def _read(folder: Path, name: str) -> FoundSource:
    kind = kind_of(name)
    match kind:
        case "requirements":
            files, packages = _requirements(folder, name)
        case "uv.lock":
            files, packages = _uv_lock(folder, name)
        case "pylock":
            files, packages = [name], len(_tables(folder, name, "packages"))
        case "conda":
            files, packages = _conda(folder, name)
    if not packages:
        raise BadInput(f"{name} names no packages", "list some, or use --environment none")
    settings = (PurePosixPath(name).parent / UV_SETTINGS).as_posix()
    if kind in ("requirements", "uv.lock") and (folder / settings).is_file():
        files = [*files, settings]
    digest = hashlib.sha256(kind.encode())
    for file in files:
        content = (folder / file).read_bytes()
        digest.update(f"\0{file}\0{len(content)}\0".encode() + content)
    source = EnvironmentSource(kind=kind, file=name, digest=digest.hexdigest())
    return FoundSource(source, tuple(files), packages)


# -- requirements.txt --------------------------------------------------------------------------------------------------


def _requirements(folder: Path, name: str) -> tuple[list[str], int]:
    """The file with those that it includes, and how many packages they name."""
    files, lines = _read_requirements(folder, name)
    wanted = [(where, line) for where, line in lines if not line.startswith("-")]
    for where, line in wanted:
        _check_requirement(where, line)
    return files, len(wanted)


def hashes(folder: Path, name: str) -> dict[str, set[str]]:
    """The hashes that a requirements file gives for its packages, by their normalized names."""
    from packaging.utils import canonicalize_name

    found: dict[str, set[str]] = {}
    for _, line in _read_requirements(folder, name)[1]:
        given = set(re.findall(r"--hash[= ]([a-z0-9]+:[0-9a-fA-F]+)", line))
        if given and (named := re.match(r"[A-Za-z0-9._-]+", line)):
            found.setdefault(canonicalize_name(named[0]), set()).update(given)
    return found


def index_urls(folder: Path, name: str) -> list[str]:
    """The indexes that a requirements file, and those that it includes, name; ``${NAME}`` in them is a variable's."""
    return [found[1] for _, line in _read_requirements(folder, name)[1] if (found := _INDEX.fullmatch(line))]


def _read_requirements(folder: Path, name: str) -> tuple[list[str], list[tuple[str, str]]]:
    """The file with those that it includes, and their lines, but for those that include."""
    files: list[str] = []
    lines: list[tuple[str, str]] = []
    waiting = [(name, "")]
    while waiting:
        file, by = waiting.pop(0)
        if file in files:
            continue
        path = folder / file
        if not path.resolve().is_relative_to(folder.resolve()):
            raise BadInput(f"{by}: {file} is outside the working folder", "move it there")
        files.append(file)
        for where, line in _lines(path, file, by):
            if included := _INCLUDE.fullmatch(line):
                if "://" in included[1]:
                    continue  # uv fetches it
                waiting.append(((PurePosixPath(file).parent / included[1].strip("\"'")).as_posix(), where))
            elif _IS_HERE.match(line):
                raise BadInput(f"{where}: {line}: {_HERE}", "remove the line; --wheels FOLDER gives wheels of your own")
            else:
                lines.append((where, line))
    return files, lines


def _lines(path: Path, name: str, by: str) -> Iterator[tuple[str, str]]:
    """The logical lines with where each begins, as pip reads them: without comments, continued after a backslash."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise BadInput(f"{by}: {name} does not exist", "add it, or remove the line") from None
    except OSError as error:
        raise BadInput(f"{by or name}: cannot read {name}: {error.strerror}", "correct the line") from None
    except UnicodeDecodeError:
        raise BadInput(f"{name} is not UTF-8", "save it in UTF-8") from None
    began, parts = 0, list[str]()
    for number, line in enumerate([*text.splitlines(), ""], 1):
        began = began or number
        parts.append(line.removesuffix("\\") if not line.lstrip().startswith("#") else "")
        if line.endswith("\\") and not line.lstrip().startswith("#"):
            continue
        whole = re.sub(r"(^|\s)#.*$", "", "".join(parts)).strip()
        if whole:
            yield f"{name}:{began}", whole
        began, parts = 0, []


def _check_requirement(where: str, line: str) -> None:
    from packaging.requirements import InvalidRequirement, Requirement

    if re.match(r"[a-z+]+://", line) or line.endswith(".whl"):
        return  # by address alone, which pip takes too
    text = re.split(r"\s+--(?:hash|config-settings|global-option)\b", line)[0]
    if "${" in text:
        return  # uv puts the variable's value there
    try:
        requirement = Requirement(text)
    except InvalidRequirement as error:
        raise BadInput(f"{where}: {str(error).splitlines()[0]}: {line}", "correct the line") from None
    if requirement.url and _IS_HERE.match(requirement.url):
        raise BadInput(f"{where}: {line}: {_HERE}", "remove the line; --wheels FOLDER gives wheels of your own")


# -- locks -------------------------------------------------------------------------------------------------------------


def _uv_lock(folder: Path, name: str) -> tuple[list[str], int]:
    project = (PurePosixPath(name).parent / _PROJECT).as_posix()
    if not (folder / project).is_file():
        raise BadInput(f"{name} has no {_PROJECT} beside it", "uv reads both; add it")
    packages = _tables(folder, name, "package")
    others = [one for one in packages if _local(one) not in (None, ".") and one.get("name") != distribution.NAME]
    if others:
        raise BadInput(
            f"{name}: {others[0].get('name')} comes from {_local(others[0])}: {_HERE}",
            "make it a package of an index, or give its wheel with --wheels and use a requirements.txt",
        )
    return [name, project], len([one for one in packages if _local(one) is None])


def _local(package: dict[str, Any]) -> str | None:
    """The folder that a package of a uv.lock comes from."""
    source = package.get("source", {})
    return next((source[key] for key in ("editable", "virtual", "directory", "path") if key in source), None)


def _tables(folder: Path, name: str, key: str) -> list[dict[str, Any]]:
    found = _table(folder, name).get(key, [])
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise BadInput(f"{name}: {key} is not a list of tables", "let its tool write it anew, such as `uv lock`")
    return found


def _table(folder: Path, name: str) -> dict[str, Any]:
    try:
        return tomllib.loads((folder / name).read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise BadInput(f"{name} is not UTF-8", "save it in UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise BadInput(f"{name} is not TOML: {error}", "let its tool write it anew, such as `uv lock`") from None


# -- conda -------------------------------------------------------------------------------------------------------------


def _conda(folder: Path, name: str) -> tuple[list[str], int]:
    """The file, and how many packages it names."""
    found = conda_file.read(folder, name)
    for line in found.pip:
        if line.startswith("-"):
            raise BadInput(f"{name}: pip: {line}: options have no effect there", "list the packages themselves")
        if _IS_HERE.match(line):
            raise BadInput(f"{name}: pip: {line}: {_HERE}", "remove the line")
        _check_requirement(f"{name}: pip", line)
    return [name], len(found.specs) + len(found.pip)
