"""An image as Docker and Podman save it, and as both load it.

Both write a tar with a ``manifest.json`` that names the image's configuration and its layers, whichever store they keep
images in and whatever else is in the tar. What they load is written here: that file and what it names, nothing else.

Source: github.com/moby/docker-image-spec, v1.2, "Combined Image JSON + Filesystem Changeset Format".
"""

from __future__ import annotations

import hashlib
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from gpuctl.cluster.errors import GpuctlError
from gpuctl.cluster.records.images import ImageLayer, StoredImage

_CHUNK_BYTES = 1 << 20
_MANIFEST = "manifest.json"


class _Manifest(msgspec.Struct, rename="pascal"):
    """One image's part of ``manifest.json``."""

    config: str
    layers: list[str]
    repo_tags: list[str] | None = None


@dataclass(frozen=True, slots=True)
class SavedImage:
    """An image in a tar that ``docker save`` or ``podman save`` has written."""

    tar: tarfile.TarFile
    config: str
    """Its configuration, as it is there: JSON."""
    layers: tuple[str, ...]
    """Their files in the tar, bottom first."""

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.config.encode()).hexdigest()

    def chunks(self, layer: str) -> Iterator[bytes]:
        """The content of a layer."""
        file = self.tar.extractfile(layer)  # where Docker 24 has written one twice, a link
        if file is None:
            raise GpuctlError(f"the saved image has no {layer}", "build it again")
        while data := file.read(_CHUNK_BYTES):
            yield data


@contextmanager
def opened(path: Path) -> Iterator[SavedImage]:
    """Context in which what lies at ``path`` can be read. Raises ``GpuctlError`` if it is no saved image."""
    try:
        with tarfile.open(path, mode="r:") as tar:
            (manifest,) = msgspec.json.decode(_content(tar, _MANIFEST), type=list[_Manifest])
            yield SavedImage(tar, _content(tar, manifest.config).decode(), tuple(manifest.layers))
    except (tarfile.TarError, KeyError, ValueError, msgspec.MsgspecError) as error:
        raise GpuctlError(f"the saved image cannot be read: {error}", "is the node's disk full?") from error


def loadable(image: StoredImage, name: str, content: Callable[[ImageLayer], Iterator[bytes]]) -> Iterator[bytes]:
    """The image as ``docker load`` and ``podman load`` take it, in pieces.

    Args:
        image: which it is.
        name: what it is to be called, with a registry and a tag.
        content: gives that of a layer.
    """
    config = f"{image.digest}.json"
    layers = [f"{layer.sha256}.tar" for layer in image.layers]
    manifest = _Manifest(config=config, layers=layers, repo_tags=[name])
    for file, data in ((_MANIFEST, msgspec.json.encode([manifest])), (config, image.config.encode())):
        yield _header(file, len(data))
        yield data
        yield _padding(len(data))
    for layer in dict.fromkeys(image.layers):
        yield _header(f"{layer.sha256}.tar", layer.bytes)
        yield from content(layer)
        yield _padding(layer.bytes)
    yield bytes(2 * tarfile.BLOCKSIZE)


def _content(tar: tarfile.TarFile, name: str) -> bytes:
    file = tar.extractfile(name)
    if file is None:
        raise KeyError(f"{name} is no file")
    return file.read()


def _header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = size
    return info.tobuf(tarfile.GNU_FORMAT)


def _padding(size: int) -> bytes:
    return bytes(-size % tarfile.BLOCKSIZE)
