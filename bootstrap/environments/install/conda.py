"""An ``environment.yml`` solved for this node and installed: conda's packages by rattler, those of its ``pip`` by uv.

It has a Python of its own, in the node's version, which sees the node's packages after its own: so torch is the node's
unless conda's is asked for.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpuctl.bootstrap.environments import prefix
from gpuctl.bootstrap.environments.facts import NodeFacts
from gpuctl.bootstrap.environments.install.lock import Lock, check_needs, write_stub
from gpuctl.bootstrap.environments.install.uv import EnvironmentFailed, IndexAway, Uv
from gpuctl.cluster.environments import conda_file
from gpuctl.cluster.environments.conda_file import CondaFile
from gpuctl.cluster.errors import GpuctlError

_TOOL = Path(__file__).with_name("conda_tool.py")
_RATTLER = "py-rattler>=0.28,<0.29"
_DEFAULTS = ("https://repo.anaconda.com/pkgs/main", "https://repo.anaconda.com/pkgs/r")
_LOCK = "conda-lock.json"
_TORCH = ("pytorch", "pytorch-cpu", "pytorch-gpu")
"""Conda's names for torch."""
_RELOCATABLE = """\
#!/bin/sh
'''exec' "$(dirname -- "$(realpath -- "$0")")"/'python' "$0" "$@"
' '''
"""
"""The first lines of a script, in place of ``#!`` and a path: what uv writes in a relocatable environment."""
_UNKNOWN = "0" * 64
"""A digest's length."""
IsOver = Callable[[], bool]


def resolve(
    file: str, code: Path, scratch: Path, place: Callable[[str], Path], uv: Uv, facts: NodeFacts, is_over: IsOver
) -> Lock:
    """Solve ``file``, in the job's folder ``code``, for this node. Raises as ``lock.resolve`` does.

    ``place``: where the environment of a digest lies.
    """
    found = conda_file.read(code, file)
    try:
        prefix.of(place(_UNKNOWN))
    except GpuctlError as error:
        raise EnvironmentFailed(error.message, error.hint) from error
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    request = {
        "channels": [uv.expanded(one) for one in _channels(found)],
        "specs": [*found.specs, *(() if any(re.match(r"python\b", one) for one in found.specs) else ("python",))],
        "constraints": [f"python {python}.*", *(_as_spec(need) for need in facts.needs)],
        "cache": str(uv.cache / "conda"),
    }
    hidden = {value: name for channel in found.channels for name, value in uv.values_in(channel).items()}
    answer = _ask("solve", request, scratch, uv, file, hidden, is_over)
    records: list[dict[str, Any]] = answer["records"]
    versions = {one["name"]: one["version"] for one in records}
    check_needs(versions, file, facts)
    (scratch / _LOCK).write_text(json.dumps({"records": records, "pip": found.pip, "hidden": hidden}))
    return Lock(
        path=scratch / _LOCK,
        packages=versions,
        digest="" if found.pip else facts.environment_of(_chosen(records)),  # else known once uv has chosen, too
        wheel_bytes=sum(one["size"] for one in records),
        torch="" if set(_TORCH) & versions.keys() else facts.torch,
        folder=(code / file).parent,
        is_conda=True,
    )


def install(
    lock: Lock, folder: Path, place: Callable[[str], Path], uv: Uv, facts: NodeFacts, *, what: str, is_over: IsOver
) -> Lock:
    """Install the packages of ``lock`` into ``folder``, for use at the ``place`` of the environment's digest; returns
    the lock with that, and with what is below ``pip``. Raises as ``Uv.run`` does."""
    scratch = lock.path.parent
    locked = json.loads(lock.path.read_text())
    somewhere = prefix.of(place(lock.digest or _UNKNOWN))
    request = {
        "records": [one["record"] for one in locked["records"]],
        "folder": str(folder),
        "prefix": somewhere,
        "cache": str(uv.cache / "conda"),
    }
    _ask("install", request, scratch, uv, what, locked["hidden"], is_over)
    for record in (folder / "conda-meta").glob("*.json"):  # what was asked for, with the channel's address
        record.write_text(_shown(record.read_text(), locked["hidden"]))
    prefix.note(folder, somewhere)
    if not locked["pip"]:
        return lock
    before = _installed(folder)
    _pip(locked["pip"], lock, folder, uv, facts, what, is_over)
    new = {name: version for name, version in _installed(folder).items() if before.get(name) != version}
    of_pip = [(f"pip {name}", version, list[str]()) for name, version in new.items()]
    digest = facts.environment_of([*_chosen(locked["records"]), *of_pip])
    prefix.move(folder, prefix.of(place(digest)))
    return replace(lock, digest=digest, packages={**lock.packages, **new})


def _chosen(records: list[dict[str, Any]]) -> list[tuple[str, str, list[str]]]:
    return [(one["name"], f"{one['version']}={one['build']}", [one["sha256"]]) for one in records]


def _installed(folder: Path) -> dict[str, str]:
    """Versions by name of the Python packages in ``folder``."""
    paths = [str(path) for path in folder.glob("lib/python3*/site-packages")]
    return {one.name: one.version for one in importlib.metadata.distributions(path=paths) if one.name}


def _as_spec(need: str) -> str:
    """
    >>> _as_spec("msgspec<1,>=0.19")
    'msgspec <1,>=0.19'
    """
    name = re.match(r"[A-Za-z0-9._-]+", need)
    assert name is not None
    return f"{name[0]} {need[name.end() :]}".strip()


def _channels(found: CondaFile) -> list[str]:
    return [one for name in found.channels for one in (_DEFAULTS if name == "defaults" else (name,))]


def _shown(text: str, hidden: Mapping[str, str]) -> str:
    """``text`` with ``${NAME}`` in place of the values of variables, such as tokens."""
    for value, name in hidden.items():
        text = text.replace(value, name) if value else text
    return text


def _ask(
    do: str,
    request: dict[str, Any],
    scratch: Path,
    uv: Uv,
    what: str,
    hidden: Mapping[str, str],
    is_over: IsOver,
) -> dict[str, Any]:
    """What the tool answers, which runs beside gpuctl: it brings 80 MB that nobody else needs."""
    asked, answer = scratch / f"{do}.json", scratch / f"{do}d.json"
    asked.write_text(json.dumps(request))
    try:
        uv.run_tool(_RATTLER, "rattler", _TOOL, do, str(asked), str(answer), cwd=scratch, what=what, is_over=is_over)
    except (EnvironmentFailed, IndexAway) as error:
        raise type(error)(_shown(error.message, hidden), error.hint) from None
    said: dict[str, Any] = json.loads(answer.read_text())
    return said


def _pip(lines: list[str], lock: Lock, folder: Path, uv: Uv, facts: NodeFacts, what: str, is_over: IsOver) -> None:
    """As conda does it: pip's packages come on top of conda's, and what conda has is not installed again."""
    python, scratch = str(folder / "bin" / "python"), lock.path.parent
    own = {name: version for name, version in facts.own_packages.items() if name != "torch" or lock.torch}
    wanted, limits = scratch / "pip.txt", scratch / "constraints.txt"
    wanted.write_text("".join(f"{line}\n" for line in lines))
    limits.write_text("".join(f"{line}\n" for line in (*facts.needs, *(f"{name}=={own[name]}" for name in own))))
    stubs = [str(write_stub(scratch / "stubs", name, version)) for name, version in own.items()]
    here = ["--python", python, "--break-system-packages", "-q"]  # conda marks its Python as one that others manage

    def run(*args: str) -> None:
        uv.run("pip", *args, *here, cwd=lock.folder, what=what, is_over=is_over)

    run("install", "--no-deps", "--no-index", *stubs)
    run("install", "--only-binary", ":all:", "--constraints", str(limits), "--requirements", str(wanted))
    run("uninstall", *own)
    begins = f"#!{folder}/bin/python"
    for script in (folder / "bin").iterdir():
        if script.is_file() and not script.is_symlink() and script.read_bytes().startswith(os.fsencode(begins)):
            _, _, rest = script.read_bytes().partition(b"\n")
            script.write_bytes(_RELOCATABLE.encode() + rest)
