"""Where a conda environment believes to be: its path is written into its files, of text and of code.

All have the same length. The path of an environment is drawn out to it by ``/.``, which leads to the same place; so in
a copy that lies elsewhere, on another node, the bytes are replaced one by one, and nothing in a file moves.
"""

from __future__ import annotations

import mmap
import os
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from gpuctl.cluster.errors import Damaged, GpuctlError

BYTES = 200
"""Conda's own placeholder has 255, which a path in a program cannot exceed."""
_SCRIPTS = "etc/conda/activate.d/*.sh"
_SCRIPTS_S = 30.0
_OF_THE_SHELL = ("_", "SHLVL", "PWD", "OLDPWD")
_NOTE = Path("conda-meta", "gpuctl-prefix.json")


class _Note(msgspec.Struct, frozen=True, kw_only=True):
    prefix: str
    """In these files, which are relative to the environment's folder."""
    files: list[str]


def of(folder: Path) -> str:
    """The prefix of an environment that lies at ``folder``.

    >>> of(Path("/opt/one"))[:14], len(of(Path("/opt/one"))), len(of(Path("/opt/other")))
    ('/opt/one/././.', 200, 200)

    Raises ``GpuctlError`` for a path that is too long.
    """
    path = os.fspath(folder)
    missing = BYTES - len(os.fsencode(path))
    if missing < 0:
        raise GpuctlError(f"the path {path} is too long for a conda environment", "use a shorter GPUCTL_STATE_DIR")
    return path + ("/" if missing % 2 else "") + "/." * (missing // 2)


def has_one(folder: Path) -> bool:
    """Whether the environment in ``folder`` is conda's."""
    return (folder / _NOTE.parent).is_dir()


def note(folder: Path, prefix: str) -> None:
    """Note which files in ``folder`` have ``prefix`` in them."""
    wanted = os.fsencode(prefix)
    files = sorted(path.relative_to(folder).as_posix() for path in _files(folder) if _has(path, wanted))
    (folder / _NOTE).write_bytes(msgspec.json.encode(_Note(prefix=prefix, files=files)))


def move(folder: Path, prefix: str) -> None:
    """Make the environment in ``folder`` one that lies at ``prefix``. Raises ``Damaged`` if it is none."""
    try:
        there = msgspec.json.decode((folder / _NOTE).read_bytes(), type=_Note)
    except (OSError, msgspec.MsgspecError) as error:
        raise Damaged(f"the packed environment does not say where it was: {error}") from error
    old, new = os.fsencode(there.prefix), os.fsencode(prefix)
    if len(old) != len(new):
        raise Damaged("the packed environment was made for paths of another length")
    for name in there.files:
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()):
            raise Damaged(f"the packed environment names {name}, which is outside of it")
        path.write_bytes(path.read_bytes().replace(old, new))
    (folder / _NOTE).write_bytes(msgspec.json.encode(_Note(prefix=prefix, files=there.files)))


def _has(path: Path, wanted: bytes) -> bool:
    if not path.stat().st_size:
        return False
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(wanted) >= 0


def activated(folder: Path, env: Mapping[str, str]) -> dict[str, str]:
    """``env`` for a process in the environment, with what the scripts of its packages set."""
    env = {**env, "CONDA_PREFIX": os.fspath(folder)}
    scripts = sorted(folder.glob(_SCRIPTS))
    if not scripts:
        return env
    lines = "".join(f". {shlex.quote(os.fspath(one))} >&2\n" for one in scripts)
    try:
        said = subprocess.run(
            ["bash", "-c", f"{lines}env -0"],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            timeout=_SCRIPTS_S,
        ).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise GpuctlError(f"the scripts in {folder / 'etc/conda/activate.d'} cannot be run: {error}") from error
    set_now = dict(line.split("=", 1) for line in os.fsdecode(said).split("\0") if "=" in line)
    return {name: value for name, value in set_now.items() if name not in _OF_THE_SHELL or name in env} or env


def _files(folder: Path) -> Iterator[Path]:
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            if path.suffix != ".pyc" and path.is_file() and not path.is_symlink():
                yield path
