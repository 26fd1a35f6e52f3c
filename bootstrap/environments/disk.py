"""A node's disk with environments: each whole in its own folder or not there, their archives beside them, and room for
the next one.

An environment is made beside its place and renamed. One that a crash of the machine may have left half written has
another boot's mark, and goes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from gpuctl.bootstrap.environments import prefix
from gpuctl.bootstrap.environments.fetch import DiskArchives
from gpuctl.cluster.environments.registry import short
from gpuctl.cluster.errors import GpuctlError
from gpuctl.cluster.records.environments import Environment

_MARK = "environment.json"


class _Mark(msgspec.Struct, frozen=True, kw_only=True):
    environment: Environment
    boot: str


@dataclass(frozen=True, slots=True)
class NodeEnvironment:
    """An environment that is ready on this node."""

    folder: Path
    environment: Environment

    @property
    def python(self) -> str:
        return str(self.folder / "bin" / "python")

    def variables(self, env: Mapping[str, str]) -> dict[str, str]:
        """``env`` for a process in it."""
        path = f"{self.folder / 'bin'}{os.pathsep}{env.get('PATH', os.defpath)}"
        if prefix.has_one(self.folder):
            return prefix.activated(self.folder, {**env, "PATH": path})
        return {**env, "PATH": path, "VIRTUAL_ENV": str(self.folder)}


class EnvironmentDisk:
    """The environments below ``folder``, their archives, and uv's cache. ``say`` prints a line to the agent's log."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self._folder = folder
        self._say = say
        self.archives = DiskArchives(folder / "archives")
        self.cache = folder / "cache"

    def find(self, digest: str) -> NodeEnvironment | None:
        """The environment that lies whole at its place; what lies there otherwise goes."""
        folder = self.place(digest)
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            mark = msgspec.json.decode((folder / _MARK).read_bytes(), type=_Mark)
            if mark.boot == _boot():
                os.utime(folder)  # the last use, by which the oldest is known
                return NodeEnvironment(folder, mark.environment)
        if folder.exists():
            shutil.rmtree(folder, ignore_errors=True)
        return None

    def place(self, digest: str) -> Path:
        """Where the environment of that digest lies, once it does."""
        return self._folder / digest

    @contextlib.contextmanager
    def making(self) -> Iterator[Path]:
        """A path to make an environment at. Whatever is left there afterwards goes."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"making.{uuid.uuid4().hex[:8]}"
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def keep(self, made: Path, environment: Environment) -> NodeEnvironment:
        """Put what was made at ``made`` at its place. Raises ``OSError``."""
        (made / _MARK).write_bytes(msgspec.json.encode(_Mark(environment=environment, boot=_boot())))
        folder = self.place(environment.digest)
        made.rename(folder)
        return NodeEnvironment(folder, environment)

    def note(self, environment: Environment) -> None:
        """Note what has become known of an environment since it was kept."""
        mark = _Mark(environment=environment, boot=_boot())
        partial = self._folder / environment.digest / f"{_MARK}.part"
        partial.write_bytes(msgspec.json.encode(mark))
        partial.rename(partial.with_name(_MARK))

    def sweep(self) -> None:
        """Remove what an agent that died has left half made."""
        for left in (*self._folder.glob("making.*"), *self.archives.folder.glob("*.part")):
            if left.is_dir():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink(missing_ok=True)

    def need(self, size: float, phase: str, in_use: Collection[str]) -> None:
        """Have ``size`` bytes free: uv's cache goes first, then archives, then the environments that were used longest
        ago, without those ``in_use`` (by digest). Raises ``GpuctlError`` if that is not enough."""
        self._folder.mkdir(parents=True, exist_ok=True)
        trees = [path for path in self._folder.iterdir() if (path / _MARK).is_file() and path.name not in in_use]
        archives = self.archives.folder.glob("*.tar.zst")
        for old in (self.cache, *sorted(archives, key=_used), *sorted(trees, key=_used)):
            if self._free() >= size:
                return
            if old.is_dir():
                self._say(f"removing {short(old.name)} of the environments on this node: the disk is short")
                shutil.rmtree(old, ignore_errors=True)
            else:
                old.unlink(missing_ok=True)
        if self._free() < size:
            raise GpuctlError(
                f"{phase} needs {size / 1e9:.1f} GB on the disk that holds {self._folder}, "
                f"and {self._free() / 1e9:.1f} GB are free",
                "free some space there",
            )

    def _free(self) -> int:
        return shutil.disk_usage(self._folder).free


def _used(path: Path) -> float:
    return path.stat().st_mtime


def _boot() -> str:
    """Which start of the machine this is; empty where nothing tells."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""
