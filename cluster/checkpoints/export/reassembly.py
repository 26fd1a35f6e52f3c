"""A checkpoint's tensors and values put together from their pieces, each block checked before a byte of it is used.

A tensor's bytes go straight to their place in a file, whatever shards it was written in, so that a model larger than
this machine's memory can be fetched.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from math import prod

from gpuctl.cluster.checkpoints.block_reader import bounds, read_block
from gpuctl.cluster.checkpoints.manifest import BLOCK_BYTES, Chunk, Manifest, Piece, TensorIndex
from gpuctl.cluster.concurrency import read_each
from gpuctl.cluster.errors import Damaged
from gpuctl.cluster.storage.bucket import Bucket

Write = Callable[[int, memoryview], None]
"""Takes bytes ``[n, n + len(data))`` of a sequence of pieces, in any order and from any thread."""

_Block = tuple[int, int]
"""Index of a part, and a block of it."""


class Reassembly:
    """Reads of a checkpoint's shards, put together into whole tensors. ``store`` shows the job's checkpoint folder."""

    def __init__(self, store: Bucket, manifest: Manifest) -> None:
        self._store = store
        self._manifest = manifest
        self._wanted: dict[_Block, list[tuple[Piece, int, Write]]] = defaultdict(list)

    def add_value(self, name: str) -> bytearray:
        """The JSON document ``name``, once ``fetch`` has returned. Raises ``Damaged`` if there is none."""
        pieces = self._manifest.values.get(name)
        if pieces is None:
            raise Damaged(f"the checkpoint has no value {name!r}")
        value = bytearray(sum(piece.size for piece in pieces))

        def write(at: int, data: memoryview) -> None:
            value[at : at + len(data)] = data

        self._add(pieces, write)
        return value

    def add_tensor(self, name: str, file: int, at: int) -> None:
        """Have ``fetch`` write the tensor ``name``, in row-major order, to the open ``file`` from byte ``at`` on."""
        tensor = tensor_of(self._manifest, name)
        for chunk in tensor.chunks:
            self._add(chunk.pieces, _into(file, at, tensor, chunk))

    @property
    def bytes(self) -> int:
        """What ``fetch`` is going to read."""
        parts = self._manifest.parts
        return sum(end - begin for part, number in self._wanted for begin, end in [bounds(parts[part], number)])

    def fetch(self, on_bytes: Callable[[int], None]) -> None:
        """Read all that was added. ``on_bytes`` is called from several threads.

        Raises ``Damaged``, ``StoreError``, ``StoreUnavailable``, and ``OSError`` if the file cannot be written.
        """

        parts = self._manifest.parts

        def read(block: _Block) -> memoryview:
            return read_block(self._store, parts[block[0]], block[1])

        def place(block: _Block, data: memoryview) -> None:
            begin, end = bounds(parts[block[0]], block[1])
            for piece, before, write in self._wanted[block]:
                low, high = max(begin, piece.at), min(end, piece.at + piece.size)
                write(before + low - piece.at, data[low - begin : high - begin])
            on_bytes(len(data))

        read_each(sorted(self._wanted), read, place)

    def _add(self, pieces: Iterable[Piece], write: Write) -> None:
        before = 0
        for piece in filter(lambda piece: piece.size, pieces):
            for number in range(piece.at // BLOCK_BYTES, -(-(piece.at + piece.size) // BLOCK_BYTES)):
                self._wanted[piece.part, number].append((piece, before, write))
            before += piece.size


def tensor_of(manifest: Manifest, name: str) -> TensorIndex:
    """Raises ``Damaged`` if the manifest has none of that name, or its chunks do not make it up."""
    tensor = manifest.tensors.get(name)
    if tensor is None:
        raise Damaged(f"the checkpoint has no tensor {name!r}, which it refers to")
    elements, size = prod(tensor.shape), byte_size(tensor)
    covered = sum(prod(chunk.sizes) for chunk in tensor.chunks)
    uneven = size % elements if elements else size
    if covered != elements or uneven or not all(_fits(chunk, tensor) for chunk in tensor.chunks):
        raise Damaged(f"the chunks of tensor {name!r} do not cover it exactly")
    return tensor


def byte_size(tensor: TensorIndex) -> int:
    """The size of the whole tensor, in bytes."""
    return sum(piece.size for chunk in tensor.chunks for piece in chunk.pieces)


def _fits(chunk: Chunk, tensor: TensorIndex) -> bool:
    """The box lies within the tensor, and its pieces have as many bytes for each element as the tensor has."""
    if not len(chunk.offsets) == len(chunk.sizes) == len(tensor.shape):
        return False
    within = all(
        min(o, s) >= 0 and o + s <= n for o, s, n in zip(chunk.offsets, chunk.sizes, tensor.shape, strict=True)
    )
    size = sum(piece.size for piece in chunk.pieces)
    return within and size * prod(tensor.shape) == byte_size(tensor) * prod(chunk.sizes)


def _into(file: int, at: int, tensor: TensorIndex, chunk: Chunk) -> Write:
    def write(low: int, data: memoryview) -> None:
        for place, start, size in byte_ranges(tensor, chunk, low, low + len(data)):
            _write_all(file, data[start - low : start - low + size], at + place)

    return write


def byte_ranges(tensor: TensorIndex, chunk: Chunk, low: int, high: int) -> Iterator[tuple[int, int, int]]:
    """Bytes ``[low, high)`` of a chunk, cut where they are not consecutive in the tensor: place in the tensor, place in
    the chunk, size."""
    if low >= high:
        return
    item = byte_size(tensor) // prod(tensor.shape)
    strides = [prod(tensor.shape[dim + 1 :]) for dim in range(len(tensor.shape))]
    first = sum(offset * stride for offset, stride in zip(chunk.offsets, strides, strict=True))
    # Dimensions from ``split`` on are consecutive: all but the first of them are whole.
    split = max(0, len(chunk.sizes) - 1)
    while split > 0 and chunk.sizes[split] == tensor.shape[split]:
        split -= 1
    length = prod(chunk.sizes[split:]) * item
    for number in range(low // length, -(-high // length)):
        start, end = max(low, number * length), min(high, (number + 1) * length)
        place, left = first, number
        for dim in reversed(range(split)):
            left, index = divmod(left, chunk.sizes[dim])
            place += index * strides[dim]
        yield place * item + start - number * length, start, end - start


def _write_all(file: int, data: memoryview, at: int) -> None:
    while data:
        written = os.pwrite(file, data, at)
        data, at = data[written:], at + written
