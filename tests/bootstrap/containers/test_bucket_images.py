"""Images between Docker or Podman and the bucket. The runtime is a program that keeps what it is given, so that a test
can see it, and can fail."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import random
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from gpuctl.bootstrap.containers import bucket_images, saved_image
from gpuctl.bootstrap.containers.client import ContainerClient
from gpuctl.bootstrap.containers.command_lines import ContainerRuntime
from gpuctl.cluster import layout
from gpuctl.cluster.environments import images
from gpuctl.cluster.errors import Damaged, Fenced, GpuctlError, StoreUnavailable
from gpuctl.cluster.records.images import StoredImage
from gpuctl.cluster.storage.bucket import Bucket, open_bucket
from tests.waiting import until

_LAYERS = (random.Random(1).randbytes(300_001), b"text " * 20_000, gzip.compress(b"as it was pulled"), b"")
_CONFIG = json.dumps({"architecture": "amd64", "rootfs": {"type": "layers"}})


def archive(folder: Path, *, style: str = "podman", layers: tuple[bytes, ...] = _LAYERS) -> Path:
    """What ``save`` writes: Podman, Docker 24 (a layer that comes twice is a link), or Docker from 25 on."""
    digests = [hashlib.sha256(layer).hexdigest() for layer in layers]
    config = {"podman": "config.json", "docker24": "abc.json", "docker28": "blobs/sha256/abc"}[style]
    names = [
        {"podman": f"{d}.tar", "docker24": f"{n}/layer.tar", "docker28": f"blobs/sha256/{d}"}[style]
        for n, d in enumerate(digests)
    ]
    manifest = [{"Config": config, "RepoTags": ["localhost/x:1"], "Layers": names, "LayerSources": {}}]
    path = folder / "saved.tar"
    with tarfile.open(path, "w") as tar:
        first: dict[str, str] = {}
        for name, digest, layer in zip(names, digests, layers, strict=True):
            if style == "docker24" and digest in first:
                info = tarfile.TarInfo(name)
                info.type, info.linkname = tarfile.SYMTYPE, f"../{first[digest]}"
                tar.addfile(info)
            elif digest not in first:
                _add(tar, name, layer)
            first.setdefault(digest, name)
        _add(tar, "oci-layout", b"{}")
        _add(tar, config, _CONFIG.encode())
        _add(tar, "manifest.json", json.dumps(manifest).encode())
    return path


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))


class Node:
    """One whose runtime keeps what it loads in a file, and has an image once it has loaded one."""

    def __init__(self, folder: Path, load: str = "cat > loaded.part && mv loaded.part loaded") -> None:
        self.folder = folder
        program = folder / "docker"
        program.write_text(f'#!/bin/sh\ncd {folder}\ncase "$1" in load) {load} ;; image) test -e loaded ;; esac\n')
        program.chmod(0o755)
        self.runtime = ContainerRuntime("docker", str(program))
        self.come: list[tuple[int, int]] = []

    def load(self, store: Bucket, pinned: str, is_over: Callable[[], bool] = lambda: False) -> str:
        client, scratch = ContainerClient(os.environ), self.folder / "scratch"
        scratch.mkdir(exist_ok=True)
        return bucket_images.load(
            store, pinned, self.runtime, client, scratch, is_over, lambda *come: self.come.append(come)
        )

    def loaded(self) -> tuple[list[str], str, list[bytes]]:
        """Tags, configuration and layers of what was loaded, as Docker would read it."""
        with tarfile.open(self.folder / "loaded") as tar:

            def content(name: str) -> bytes:
                file = tar.extractfile(name)
                assert file is not None
                return file.read()

            (manifest,) = json.loads(content("manifest.json"))
            return manifest["RepoTags"], content(manifest["Config"]).decode(), [*map(content, manifest["Layers"])]


@pytest.fixture
def store() -> Bucket:
    return open_bucket("memory://")


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def upload(store: Bucket, path: Path, name: str = "mine", said: list[str] | None = None) -> StoredImage:
    with saved_image.opened(path) as saved:
        return bucket_images.upload(store, saved, name, "node-0", lambda: False, ([] if said is None else said).append)


def pinned(store: Bucket) -> str:
    return images.pinned(store, "bucket:mine")


@pytest.mark.parametrize("style", ["podman", "docker24", "docker28"])
def test_what_one_runtime_has_saved_another_loads(tmp_path: Path, store: Bucket, node: Node, style: str) -> None:
    layers = (*_LAYERS, _LAYERS[1])
    image = upload(store, archive(tmp_path, style=style, layers=layers))
    assert image.digest == hashlib.sha256(_CONFIG.encode()).hexdigest()
    assert node.load(store, pinned(store)) == f"localhost/gpuctl/mine:{image.digest[:12]}"
    assert node.loaded() == ([f"localhost/gpuctl/mine:{image.digest[:12]}"], _CONFIG, [*layers])
    total = sum(map(len, _LAYERS))
    assert node.come[-1] == (total, total)
    stored = store.list(f"{layout.IMAGES}/layers")
    assert len(stored) == len(_LAYERS) and sum(entry.size for entry in stored) < 350_000


def test_a_large_layer_comes_in_its_order(
    tmp_path: Path, store: Bucket, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_images, "_RANGE_BYTES", 1000)
    upload(store, archive(tmp_path))
    node.load(store, pinned(store))
    assert node.loaded()[2] == [*_LAYERS]


def test_layers_that_the_bucket_has_are_not_sent_again(tmp_path: Path, store: Bucket) -> None:
    said: list[str] = []
    upload(store, archive(tmp_path), said=said)
    assert len(said) == len(_LAYERS)
    upload(store, archive(tmp_path, layers=(*_LAYERS[:2], b"new")), "other", said)
    assert len(said) == len(_LAYERS) + 1, said


@pytest.mark.parametrize("harm", ["other", "cut", "longer", "gone", "no archive"])
def test_a_layer_that_is_not_what_was_sent_is_never_loaded(
    tmp_path: Path, store: Bucket, node: Node, harm: str
) -> None:
    image = upload(store, archive(tmp_path))
    first, second = (layout.image_layer(layer.sha256) for layer in image.layers[:2])
    good = store.get(first)
    assert good is not None
    if harm == "gone":
        store.delete([first])
    else:
        other = store.get(second)
        assert other is not None
        store.put(
            first,
            {"other": other, "cut": good[:-9], "longer": zstandard.compress(bytes(10**7)), "no archive": b"#" * 99}[
                harm
            ],
        )
    with pytest.raises(Damaged, match="in the bucket is not what was sent; `gpuctl image rm` it and"):
        node.load(store, pinned(store))
    assert not (tmp_path / "loaded").exists()


def test_a_bucket_that_is_away_meanwhile_is_waited_for(
    tmp_path: Path, store: Bucket, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_images, "_AGAIN_S", 0.01)
    upload(store, archive(tmp_path))
    name = pinned(store)
    away = _Away(store, 3)
    assert node.load(away, name)  # type: ignore[arg-type]
    assert away.asked > 3
    assert node.loaded()[2] == [*_LAYERS]


def test_nobody_waits_for_an_image_whose_job_is_over(tmp_path: Path, store: Bucket, node: Node) -> None:
    upload(store, archive(tmp_path))
    name = pinned(store)
    over = threading.Event()
    away = _Away(store, 10**9, over.set)
    with pytest.raises(Fenced):
        node.load(away, name, over.is_set)  # type: ignore[arg-type]
    assert not (tmp_path / "loaded").exists()


def test_nor_where_the_runtime_takes_nothing_any_more(tmp_path: Path, store: Bucket) -> None:
    upload(store, archive(tmp_path))
    node, over = Node(tmp_path, "echo > begun; exec sleep 86397"), threading.Event()

    def give_up() -> None:
        until((tmp_path / "begun").exists, "it begins")
        over.set()

    threading.Thread(target=give_up).start()
    with pytest.raises(Fenced):
        node.load(store, pinned(store), over.is_set)


def test_half_a_layer_in_the_bucket_is_sent_again(tmp_path: Path, store: Bucket, node: Node) -> None:
    image = upload(store, archive(tmp_path))
    key = layout.image_layer(image.layers[0].sha256)
    store.put(key, (store.get(key) or b"")[:40])
    upload(store, archive(tmp_path))
    node.load(store, pinned(store))
    assert node.loaded()[2] == [*_LAYERS]


def test_why_the_runtime_did_not_take_it_is_told(tmp_path: Path, store: Bucket) -> None:
    upload(store, archive(tmp_path))
    for load in ("echo Error: no space left on device >&2; exit 1", "cat > /dev/null; echo no space left on device"):
        with pytest.raises(GpuctlError, match="cannot load bucket:mine: no space left on device; is the node's disk"):
            Node(tmp_path, load).load(store, pinned(store))


def test_one_that_was_removed_meanwhile_is_told(store: Bucket, node: Node) -> None:
    with pytest.raises(GpuctlError, match="image bucket:mine is not in the bucket any more; build it"):
        node.load(store, f"bucket:mine@sha256:{'1' * 64}")


@pytest.mark.parametrize("data", [b"", b"no tar", b"\0" * 10240])
def test_what_is_no_saved_image_is_refused(tmp_path: Path, store: Bucket, data: bytes) -> None:
    (tmp_path / "saved.tar").write_bytes(data)
    with pytest.raises(GpuctlError, match="the saved image cannot be read"):
        upload(store, tmp_path / "saved.tar")
    assert store.list(layout.IMAGES) == []


def test_an_upload_that_nobody_waits_for_ends_and_names_nothing(tmp_path: Path, store: Bucket) -> None:
    with saved_image.opened(archive(tmp_path)) as saved, pytest.raises(Fenced):
        bucket_images.upload(store, saved, "mine", "node-0", lambda: True, print)
    assert store.list(layout.IMAGES) == []


class _Away:
    """A bucket that does not answer so many times."""

    def __init__(self, store: Bucket, times: int, asked: Callable[[], None] = lambda: None) -> None:
        self._store = store
        self._times = times
        self._on_ask = asked
        self.asked = 0

    def get(self, key: str) -> bytes | None:
        self._ask()
        return self._store.get(key)

    def get_range(self, key: str, start: int, end: int) -> memoryview:
        self._ask()
        return self._store.get_range(key, start, end)

    def _ask(self) -> None:
        self.asked += 1
        self._on_ask()
        if self.asked <= self._times:
            raise StoreUnavailable("the bucket does not answer")
