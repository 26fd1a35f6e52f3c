"""An environment's archive from the nearest place that has it, unpacked as it comes: this node's disk, other nodes, the
bucket. What one place cannot give any more, the next one goes on with."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import queue
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from gpuctl.bootstrap.environments.pack import unpack
from gpuctl.cluster import layout
from gpuctl.cluster.errors import CorruptRecord, Damaged
from gpuctl.cluster.records.environments import PackedFiles
from gpuctl.cluster.records.rounds import Member
from gpuctl.cluster.storage.interface import PartStore
from gpuctl.trainers.checkpoint.replicas import ReplicaConnection

_PIECE_BYTES = 1 << 20
_AHEAD = 16
"""Pieces that are fetched before they are unpacked."""
_SILENT_S = 10.0
_PEERS = 3


class ArchiveSource(Protocol):
    """A place that may have an archive."""

    @property
    def name(self) -> str:
        """For people."""
        ...

    def read(self, archive: PackedFiles, start: int) -> Iterator[bytes | memoryview]:
        """Its bytes from ``start`` on, as far as they are to be had."""
        ...


class DiskArchives:
    """Archives on this node's disk, below ``folder``."""

    name = "this node"

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, archive: PackedFiles) -> Path:
        return self.folder / f"{archive.sha256}.tar.zst"

    def read(self, archive: PackedFiles, start: int) -> Iterator[bytes]:
        """See ``ArchiveSource``."""
        try:
            with self.path(archive).open("rb") as file:
                file.seek(start)
                while data := file.read(_PIECE_BYTES):
                    yield data
        except OSError:
            return


class PeerArchives:
    """Archives on another node's disk, from its replica server at ``place``."""

    def __init__(self, name: str, place: str, token: str) -> None:
        self.name = name
        self._place = place
        self._token = token

    def read(self, archive: PackedFiles, start: int) -> Iterator[bytes]:
        """See ``ArchiveSource``."""
        line = ReplicaConnection(self._place, self._token, _SILENT_S)
        try:
            line.ask("GET", archive_path(archive.sha256), {"Range": f"bytes={start}-{archive.bytes - 1}"}, None)
            answer = line.getresponse()
            while answer.status == 206 and (data := answer.read(_PIECE_BYTES)):
                yield data
        except (OSError, http.client.HTTPException):
            return
        finally:
            line.close()


class BucketArchives:
    """Archives of one environment in the bucket."""

    name = "the bucket"

    def __init__(self, store: PartStore, environment: str) -> None:
        self._store = store
        self._environment = environment

    def read(self, archive: PackedFiles, start: int) -> Iterator[memoryview]:
        """See ``ArchiveSource``. Raises as ``PartStore.stream`` does, but for an archive that is not there."""
        key = layout.environment_archive(self._environment, archive.sha256)
        with contextlib.suppress(FileNotFoundError):
            yield from self._store.stream(key, start, archive.bytes)


def peers_of(members: Iterable[Member], own: str, token: str) -> list[PeerArchives]:
    """The nodes to ask before the bucket: a few of ``members``, beginning with the one after the node ``own``, so that
    not all ask the same one."""
    others = sorted((one for one in members if one.tier_port and one.node != own), key=lambda member: member.node)
    nearest = sorted(others, key=lambda member: member.node < own)[:_PEERS]
    return [PeerArchives(one.node, place_of(one.address, one.tier_port), token) for one in nearest]


def place_of(address: str, port: int) -> str:
    """``address:port`` as HTTP has it."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def archive_path(sha256: str) -> str:
    """By which a replica server knows an archive."""
    return f"/environments/{sha256}/archive"


def fetch(archive: PackedFiles, sources: Sequence[ArchiveSource], own: DiskArchives, folder: Path) -> dict[str, int]:
    """Unpack ``archive`` into ``folder``, and keep it in ``own`` for other nodes; returns how many bytes came from
    which place.

    Raises ``Damaged`` if no place has it as it was packed, ``OSError`` for this node's disk, ``StoreError`` and
    ``StoreUnavailable`` for the bucket.
    """
    served: dict[str, int] = {}
    kept = own.path(archive)
    kept.parent.mkdir(parents=True, exist_ok=True)
    partial = kept.with_name(f"{kept.name}.part")
    digest = hashlib.sha256()
    try:
        with partial.open("wb") as copy:

            def arriving() -> Iterator[bytes | memoryview]:
                done = 0
                for source in sources:
                    for piece in source.read(archive, done):
                        digest.update(piece)
                        if source is not own:
                            copy.write(piece)
                        done += len(piece)
                        served[source.name] = served.get(source.name, 0) + len(piece)
                        yield piece
                    if done >= archive.bytes:
                        return
                raise Damaged(f"an environment's archive cannot be had: {done} of {archive.bytes} bytes came")

            with _ahead(arriving()) as pieces:
                _unpack(pieces, folder, kept)
        if digest.hexdigest() != archive.sha256:
            kept.unlink(missing_ok=True)
            raise Damaged("an environment's archive is not what was packed")
        if set(served) != {own.name}:
            partial.rename(kept)
    finally:
        partial.unlink(missing_ok=True)
    return served


def _unpack(pieces: Iterable[bytes], folder: Path, kept: Path) -> None:
    try:
        unpack(pieces, folder)
    except CorruptRecord as error:
        kept.unlink(missing_ok=True)
        raise Damaged(str(error)) from error


@contextlib.contextmanager
def _ahead(pieces: Iterable[bytes | memoryview]) -> Iterator[Iterator[bytes]]:
    """The same pieces, fetched by another thread while the last ones are worked on. What it raises is raised here."""
    waiting: queue.Queue[bytes | BaseException | None] = queue.Queue(_AHEAD)
    ended = threading.Event()

    def put(item: bytes | BaseException | None) -> bool:
        while not ended.is_set():
            with contextlib.suppress(queue.Full):
                waiting.put(item, timeout=0.1)
                return True
        return False

    def run() -> None:
        last: BaseException | None = None
        try:
            for piece in pieces:
                if not put(bytes(piece)):
                    return
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
            last = error
        put(last)

    def got() -> Iterator[bytes]:
        while True:
            item = waiting.get()
            if isinstance(item, bytes):
                yield item
            elif item is None:
                return
            else:
                raise item

    thread = threading.Thread(target=run, name="environment-fetch", daemon=True)
    thread.start()
    try:
        yield got()
    finally:
        ended.set()
        thread.join()
