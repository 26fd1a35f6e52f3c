"""An archive from the nearest place that has it, and on from the next one."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuctl.bootstrap.agent.replica_server import ReplicaServer
from gpuctl.bootstrap.environments import pack
from gpuctl.bootstrap.environments.fetch import ArchiveSource, BucketArchives, DiskArchives, PeerArchives, fetch
from gpuctl.cluster import layout
from gpuctl.cluster.errors import Damaged, StoreUnavailable
from gpuctl.cluster.records.environments import PackedFiles
from gpuctl.cluster.storage.bucket import Bucket, open_bucket

DIGEST = "d" * 64


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    folder = tmp_path / "environment"
    folder.mkdir()
    (folder / "content.py").write_bytes(bytes(range(256)) * 20_000)
    (folder / "noise.bin").write_bytes(random.Random(1).randbytes(3_000_000))
    path = tmp_path / "made.tar.zst"
    pack.pack(folder, pack.files_of(folder), path)
    return path


@pytest.fixture
def packed(archive: Path) -> PackedFiles:
    return PackedFiles(sha256=hashlib.sha256(archive.read_bytes()).hexdigest(), bytes=archive.stat().st_size)


@pytest.fixture
def own(tmp_path: Path) -> DiskArchives:
    return DiskArchives(tmp_path / "own")


@pytest.fixture
def bucket(archive: Path, packed: PackedFiles) -> Bucket:
    store = open_bucket("memory://")
    store.put(layout.environment_archive(DIGEST, packed.sha256), archive.read_bytes())
    return store


@pytest.fixture
def peer(tmp_path: Path, archive: Path, packed: PackedFiles) -> Iterator[PeerArchives]:
    folder = tmp_path / "peer" / "archives"
    folder.mkdir(parents=True)
    (folder / f"{packed.sha256}.tar.zst").write_bytes(archive.read_bytes())
    server = ReplicaServer(tmp_path / "peer" / "jobs", "secret", folder)
    port = server.start("127.0.0.1")
    yield PeerArchives("node-2", f"127.0.0.1:{port}", "secret")
    server.stop()


class Broken:
    """Has the first bytes of an archive, as ``change`` makes them."""

    name = "broken"

    def __init__(self, path: Path, size: int, change: bytes = b"") -> None:
        self._data = change + path.read_bytes()[len(change) : size]

    def read(self, _archive: PackedFiles, start: int) -> Iterator[bytes]:
        yield self._data[start:]


def got(packed: PackedFiles, sources: list[ArchiveSource], own: DiskArchives, folder: Path) -> dict[str, int]:
    folder.mkdir()
    served = fetch(packed, sources, own, folder)
    assert (folder / "content.py").read_bytes() == bytes(range(256)) * 20_000
    assert not list(own.folder.glob("*.part"))
    return served


def test_it_comes_from_a_peer_and_is_kept_for_the_next_one(
    packed: PackedFiles, own: DiskArchives, peer: PeerArchives, bucket: Bucket, tmp_path: Path
) -> None:
    sources: list[ArchiveSource] = [own, peer, BucketArchives(bucket, DIGEST)]
    assert got(packed, sources, own, tmp_path / "1") == {"node-2": packed.bytes}
    assert got(packed, sources, own, tmp_path / "2") == {"this node": packed.bytes}


def test_where_one_place_ends_the_next_one_goes_on(
    archive: Path, packed: PackedFiles, own: DiskArchives, bucket: Bucket, tmp_path: Path
) -> None:
    first = Broken(archive, 1_000_000)
    served = got(packed, [first, BucketArchives(bucket, DIGEST)], own, tmp_path / "out")
    assert served == {"broken": 1_000_000, "the bucket": packed.bytes - 1_000_000}


@pytest.mark.parametrize("place", ["127.0.0.1:1", "wrong token"])
def test_a_peer_that_cannot_be_used_is_passed_over(
    packed: PackedFiles, own: DiskArchives, peer: PeerArchives, bucket: Bucket, tmp_path: Path, place: str
) -> None:
    other = PeerArchives("gone", peer._place if place == "wrong token" else place, "another")
    served = got(packed, [other, BucketArchives(bucket, DIGEST)], own, tmp_path / "out")
    assert served == {"the bucket": packed.bytes}


def test_what_is_not_what_was_packed_is_refused_and_not_kept(
    archive: Path, packed: PackedFiles, own: DiskArchives, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(Damaged):
        fetch(packed, [Broken(archive, packed.bytes, b"xx")], own, tmp_path / "out")
    with pytest.raises(Damaged, match=f"1000 of {packed.bytes} bytes came"):
        fetch(packed, [Broken(archive, 1000)], own, tmp_path / "out")
    whole_but_another = PackedFiles(sha256="0" * 64, bytes=packed.bytes)
    with pytest.raises(Damaged, match="is not what was packed"):
        (tmp_path / "another").mkdir()
        fetch(whole_but_another, [Broken(archive, packed.bytes)], own, tmp_path / "another")
    assert list(own.folder.iterdir()) == []


def test_a_bucket_that_is_away_is_no_damage(packed: PackedFiles, own: DiskArchives, tmp_path: Path) -> None:
    class Away:
        name = "the bucket"

        def read(self, _archive: PackedFiles, _start: int) -> Iterator[bytes]:
            raise StoreUnavailable("the bucket does not answer")

    (tmp_path / "out").mkdir()
    with pytest.raises(StoreUnavailable):
        fetch(packed, [Away()], own, tmp_path / "out")
