"""Images on their way from a node to the bucket, and from the bucket to other nodes.

Layers that the bucket has are not sent again. What comes down is handed to Docker or Podman as it comes.
"""

from __future__ import annotations

import contextlib
import hashlib
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import TypeVar

from gpuctl.bootstrap.containers.client import ContainerClient, last_line
from gpuctl.bootstrap.containers.command_lines import ContainerRuntime
from gpuctl.bootstrap.containers.saved_image import SavedImage, loadable
from gpuctl.cluster import layout
from gpuctl.cluster.environments import images
from gpuctl.cluster.errors import Damaged, Fenced, GpuctlError, StoreUnavailable
from gpuctl.cluster.records.images import ImageLayer, StoredImage
from gpuctl.cluster.storage.bucket import Bucket
from gpuctl.cluster.storage.interface import PartStore
from gpuctl.cluster.storage.upload import upload_chunks

T = TypeVar("T")

_LEVEL = 3
_RANGE_BYTES = 16 << 20
_RANGES_AT_ONCE = 4
"""Of one layer: a single connection to a bucket carries less than a machine's network does."""
_AGAIN_S = 1.0
_LOOK_S = 0.1
_END_S = 10.0
_COMPRESSED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd")
"""What gzip and zstd begin with: Docker's containerd store saves layers as they were pulled."""


def upload(
    store: Bucket, saved: SavedImage, name: str, node: str, is_over: Callable[[], bool], say: Callable[[str], None]
) -> StoredImage:
    """Have a saved image in the bucket under ``name``, built by ``node``.

    Raises ``StoreUnavailable``, ``StoreError``, ``OSError`` for this node's disk, and ``Fenced`` once it ``is_over``.
    """

    def chunks(file: str) -> Iterator[bytes]:
        for chunk in saved.chunks(file):
            _check(is_over)
            yield chunk

    known = {layer.sha256: layer.stored_bytes for one in images.listed(store) for layer in one.image.layers}
    there = {entry.key: entry.size for entry in store.list(f"{layout.IMAGES}/layers")}
    layers: dict[str, ImageLayer] = {}
    for file in dict.fromkeys(saved.layers):
        sha256, size = _measured(chunks(file))
        key = layout.image_layer(sha256)
        if key not in there or there[key] != known.get(sha256):  # what nobody names may be half a layer
            say(f"sending layer {sha256[:12]}, {max(size / 1e6, 0.1):.1f} MB")
            there[key] = _send(store, key, chunks(file))
        layers[file] = ImageLayer(sha256=sha256, bytes=size, stored_bytes=there[key])
    image = StoredImage(
        digest=saved.digest,
        name=name,
        config=saved.config,
        layers=tuple(layers[file] for file in saved.layers),
        node=node,
        built_at=time.time(),
    )
    images.publish(store, image)
    return image


def load(
    store: PartStore,
    pinned: str,
    runtime: ContainerRuntime,
    client: ContainerClient,
    folder: Path,
    is_over: Callable[[], bool],
    on_bytes: Callable[[int, int], None],
) -> str:
    """Have an image of the bucket's here; returns what the runtime calls it. A bucket that is away is waited for.

    Args:
        store: the cluster's bucket.
        pinned: the image, as a job's spec has it.
        runtime: Docker or Podman.
        client: how it is asked.
        folder: empty, for what Podman writes on the way.
        is_over: tells when the image is no longer needed.
        on_bytes: takes how many bytes of how many have come.

    Raises ``GpuctlError`` if it is not in the bucket, or the runtime does not take it, ``Damaged`` if it is not what
    was sent, ``Fenced`` once it ``is_over``.
    """
    image = _patiently(lambda: images.built(store, images.digest_of(pinned)), is_over)
    if image is None:
        raise GpuctlError(f"image {images.shown(pinned)} is not in the bucket any more", "build it: gpuctl image build")
    name = images.local_name(pinned)
    total = sum(layer.bytes for layer in dict.fromkeys(image.layers))
    come = 0
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [runtime.program, "load", "--quiet"],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env={**client.env, "TMPDIR": str(folder)},
        )
        assert process.stdin is not None
        threading.Thread(target=_end_once_over, args=(process, is_over), name="image-load", daemon=True).start()
        try:
            for piece in loadable(image, name, lambda layer: _content(store, layer, is_over)):
                process.stdin.write(piece)
                come += len(piece)
                on_bytes(min(come, total), total)
            process.stdin.close()
            process.wait()
        except BrokenPipeError:
            with contextlib.suppress(subprocess.TimeoutExpired):  # it says why
                process.wait(_END_S)
        finally:
            process.kill()
            process.wait()
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        _check(is_over)
        if process.returncode or not client.has(runtime, name):
            log.seek(0)
            why = last_line(log.read().decode(errors="replace"))
            raise GpuctlError(f"cannot load {images.shown(pinned)}: {why}", "is the node's disk full?")
    return name


def _end_once_over(process: subprocess.Popen[bytes], is_over: Callable[[], bool]) -> None:
    """Also where it takes nothing any more, and who writes to it would wait for ever."""
    while process.poll() is None:
        if is_over():
            process.kill()
            return
        time.sleep(_LOOK_S)


def _measured(chunks: Iterable[bytes]) -> tuple[str, int]:
    digest, size = hashlib.sha256(), 0
    for chunk in chunks:
        digest.update(chunk)
        size += len(chunk)
    return digest.hexdigest(), size


def _send(store: Bucket, key: str, chunks: Iterator[bytes]) -> int:
    """Compress and send; returns the size of the object."""
    import zstandard

    first = next(chunks, b"")
    level = 1 if first.startswith(_COMPRESSED) else _LEVEL
    size = 0

    def compressed() -> Iterator[bytes]:
        nonlocal size
        compressor = zstandard.ZstdCompressor(level=level, threads=-1).compressobj()
        for chunk in chain([first], chunks):
            if data := compressor.compress(chunk):
                size += len(data)
                yield data
        data = compressor.flush()
        size += len(data)
        yield data

    upload_chunks(store, key, compressed())
    return size


def _content(store: PartStore, layer: ImageLayer, is_over: Callable[[], bool]) -> Iterator[bytes]:
    """Of a layer in the bucket. Raises ``Damaged`` at its end, if it is not what was sent."""
    import zstandard

    digest, size = hashlib.sha256(), 0
    unpacker = zstandard.ZstdDecompressor().decompressobj()
    try:
        for data in _ranges(store, layout.image_layer(layer.sha256), layer.stored_bytes, is_over):
            content = unpacker.decompress(data)
            digest.update(content)
            size += len(content)
            if size > layer.bytes:
                break
            yield content
    except (zstandard.ZstdError, FileNotFoundError) as error:
        raise _damaged(layer) from error
    if digest.hexdigest() != layer.sha256:
        raise _damaged(layer)


def _damaged(layer: ImageLayer) -> Damaged:
    return Damaged(
        f"layer {layer.sha256[:12]} in the bucket is not what was sent; `gpuctl image rm` it and build it again"
    )


def _ranges(store: PartStore, key: str, size: int, is_over: Callable[[], bool]) -> Iterator[memoryview]:
    """An object in its order, several ranges of which are on their way at any time."""
    over = threading.Event()

    def ended() -> bool:
        return over.is_set() or is_over()

    def get(start: int) -> memoryview:
        return _patiently(lambda: store.get_range(key, start, min(size, start + _RANGE_BYTES)), ended)

    with ThreadPoolExecutor(_RANGES_AT_ONCE, thread_name_prefix="image-layer") as pool:
        coming: deque[Future[memoryview]] = deque()
        try:
            for start in range(0, size, _RANGE_BYTES):
                coming.append(pool.submit(get, start))
                if len(coming) == _RANGES_AT_ONCE:
                    yield coming.popleft().result()
            while coming:
                yield coming.popleft().result()
        finally:
            over.set()


def _patiently(call: Callable[[], T], is_over: Callable[[], bool]) -> T:
    """What ``call`` returns, once the bucket answers. Raises ``Fenced`` when it ``is_over``."""
    while True:
        _check(is_over)
        try:
            return call()
        except StoreUnavailable:
            time.sleep(_AGAIN_S)


def _check(is_over: Callable[[], bool]) -> None:
    if is_over():
        raise Fenced("the image is no longer needed")
