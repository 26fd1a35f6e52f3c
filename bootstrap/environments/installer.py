"""An environment made on this node from its source."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gpuctl.bootstrap.environments.disk import EnvironmentDisk, NodeEnvironment
from gpuctl.bootstrap.environments.facts import NodeFacts
from gpuctl.bootstrap.environments.install import build, conda, driver, lock
from gpuctl.bootstrap.environments.install.lock import Lock
from gpuctl.bootstrap.environments.install.uv import EnvironmentFailed, IndexAway, Uv
from gpuctl.cluster.clock import Clock
from gpuctl.cluster.errors import GpuctlError
from gpuctl.cluster.records.environments import Environment, EnvironmentSource, PackedFiles
from gpuctl.cluster.storage.interface import Store

PATIENCE_S = 300.0
"""For an index that does not answer."""
_AGAIN_S = 10.0
_LOOK_S = 0.5
_UNPACKED = 4
"""Times the size of its wheels that an environment takes, with what it is made of: as seen with 49 packages."""
IsOver = Callable[[], bool]


class Installer:
    """Installs environments on one node.

    Args:
        disk: where they lie.
        store: the bucket, which may have wheels for them.
        node: the node's name.
        need: has so many bytes free for a phase, or raises ``GpuctlError``.
        do: takes note of what is done, for people.
        pause: waits for so many seconds, or until this node leaves.
    """

    def __init__(
        self,
        disk: EnvironmentDisk,
        store: Store,
        node: str,
        clock: Clock,
        need: Callable[[float, str], None],
        do: Callable[[str], None],
        pause: Callable[[float], object],
    ) -> None:
        self._disk = disk
        self._store = store
        self._node = node
        self._clock = clock
        self._need = need
        self._do = do
        self._pause = pause

    def install(
        self, source: EnvironmentSource, code: Path, uv: Uv, facts: NodeFacts, is_over: IsOver
    ) -> NodeEnvironment:
        """Resolve ``source``, which is in the job's folder ``code``, for a node of these ``facts``, and install it. An
        index that is away is waited for.

        Raises ``EnvironmentFailed``, ``Fenced``, ``GpuctlError``, ``OSError``.
        """
        deadline = self._clock.monotonic() + PATIENCE_S
        while True:
            self._do(f"building the environment of {source.file}")
            try:
                with self._disk.making() as scratch:
                    return self._install(source, code, scratch, uv, facts, is_over)
            except IndexAway as error:
                if self._clock.monotonic() > deadline:
                    raise EnvironmentFailed(error.message, error.hint) from error
                self._do(f"waiting for a package index: {error.message}")
                again = self._clock.monotonic() + _AGAIN_S
                while self._clock.monotonic() < again and not is_over():
                    self._pause(_LOOK_S)

    def _install(
        self, source: EnvironmentSource, code: Path, scratch: Path, uv: Uv, facts: NodeFacts, is_over: IsOver
    ) -> NodeEnvironment:
        scratch.mkdir()
        made = scratch / "made"
        resolved = self._resolved(source, code, scratch, made, uv, facts, is_over)
        if resolved.digest and (there := self._disk.find(resolved.digest)):
            return there
        self._need(_UNPACKED * resolved.wheel_bytes, "building the environment")
        if resolved.is_conda:
            place = self._disk.place
            resolved = conda.install(resolved, made, place, uv, facts, what=source.file, is_over=is_over)
            build.show_node_packages(made)
            if there := self._disk.find(resolved.digest):
                return there
        else:
            build.install(resolved, made, uv, what=source.file, is_over=is_over)
        environment = Environment(
            digest=resolved.digest,
            file=source.file,
            packages=resolved.packages,
            bytes=0,  # known once it is packed
            files=0,
            pack=PackedFiles(sha256="", bytes=0),
            python=facts.python,
            platform=facts.platform,
            torch=resolved.torch,
            node=self._node,
            built_at=time.time(),
        )
        return self._disk.keep(made, environment)

    def _resolved(
        self,
        source: EnvironmentSource,
        code: Path,
        scratch: Path,
        made: Path,
        uv: Uv,
        facts: NodeFacts,
        is_over: IsOver,
    ) -> Lock:
        if source.kind == "conda":
            return conda.resolve(source.file, code, scratch, self._disk.place, uv, facts, is_over)
        wheels = self._wheels(source, scratch / "wheels")
        with ThreadPoolExecutor(1) as beside:
            empty = beside.submit(build.make_empty, made, uv, what=source.file, is_over=is_over)
            resolved = lock.resolve(source, code, scratch, uv, facts, wheels=wheels, is_over=is_over)
            empty.result()
        driver.check(resolved.packages, source.file)
        return resolved

    def _wheels(self, source: EnvironmentSource, folder: Path) -> Path | None:
        """The wheels that ``--wheels`` gave, in a folder."""
        if not source.wheels:
            return None
        folder.mkdir()
        for key in source.wheels:
            data = self._store.get(key)
            if data is None:
                raise GpuctlError(f"the bucket has no {key}", "submit the job again")
            (folder / key.rpartition("/")[2]).write_bytes(data)
        return folder
