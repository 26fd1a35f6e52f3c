"""An environment that a node has built, on its way to the others: packed, offered from this node's disk, uploaded."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from msgspec.structs import replace

from gpuctl.bootstrap.environments import pack
from gpuctl.bootstrap.environments.claim import BuildClaim
from gpuctl.bootstrap.environments.disk import EnvironmentDisk, NodeEnvironment
from gpuctl.cluster import layout
from gpuctl.cluster.environments import registry
from gpuctl.cluster.errors import GpuctlError, StoreError, StoreUnavailable
from gpuctl.cluster.records.codec import encode
from gpuctl.cluster.records.environments import Environment, PackedFiles
from gpuctl.cluster.storage.bucket import Bucket
from gpuctl.cluster.storage.upload import upload_file

_AGAIN_S = 5.0
"""Between two tries to upload an archive while the bucket is away."""


class Publisher:
    """Publishes what was built on one node. ``stopped``: set once the node leaves."""

    def __init__(
        self, store: Bucket, disk: EnvironmentDisk, stopped: threading.Event, say: Callable[[str], None]
    ) -> None:
        self._store = store
        self._disk = disk
        self._stopped = stopped
        self._say = say

    def publish(self, found: NodeEnvironment, request: str, claim: BuildClaim) -> None:
        """Have the environment in the bucket, however long that is away, and end the claim."""
        try:
            environment = self._packed(found)
            claim.tell_built(environment)
            while not self._stopped.is_set():
                try:
                    self._upload(environment)
                    registry.publish(self._store, request, environment)
                    return
                except (StoreError, StoreUnavailable):
                    self._stopped.wait(_AGAIN_S)
        except (GpuctlError, OSError) as error:
            self._say(f"environment of {found.environment.file}: other nodes must build it: {error}")
        finally:
            claim.release()

    def publish_bytecode(self, found: NodeEnvironment) -> None:
        """Add what Python has compiled there by now: who comes later need not compile it again."""
        environment = registry.built(self._store, found.environment.digest)
        files = list(pack.bytecode_of(found.folder))
        if environment is None or environment.bytecode or not files:
            return
        try:
            packed = self._pack(found, files)
            key = layout.environment_archive(environment.digest, packed.sha256)
            upload_file(self._store, key, self._disk.archives.path(packed))
            self._store.put(layout.environment(environment.digest), encode(replace(environment, bytecode=packed)))
        except (GpuctlError, OSError) as error:
            self._say(f"environment of {environment.file}: no bytecode for other nodes: {error}")

    def _packed(self, found: NodeEnvironment) -> Environment:
        if found.environment.pack.sha256 and self._disk.archives.path(found.environment.pack).is_file():
            return found.environment
        size, files = pack.size_of(found.folder)
        packed = self._pack(found, pack.files_of(found.folder))
        environment = replace(found.environment, bytes=size, files=files, pack=packed)
        self._disk.note(environment)
        return environment

    def _pack(self, found: NodeEnvironment, files: Iterable[Path]) -> PackedFiles:
        archives = self._disk.archives
        archives.folder.mkdir(parents=True, exist_ok=True)
        made = archives.folder / f"{found.environment.digest}.made"
        packed = pack.pack(found.folder, files, made)
        made.rename(archives.path(packed))
        return packed

    def _upload(self, environment: Environment) -> None:
        """Nothing, if the same packages are there by another file."""
        if registry.built(self._store, environment.digest) is None:
            key = layout.environment_archive(environment.digest, environment.pack.sha256)
            upload_file(self._store, key, self._disk.archives.path(environment.pack))
            self._say(f"environment of {environment.file}: in the bucket, {environment.pack.bytes / 1e6:.1f} MB")
