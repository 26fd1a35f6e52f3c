"""What a committed checkpoint consists of: ``manifest.json``, the last file that is written before the commit.

::

    checkpoints/<step>-r<round>.<n>/00003-0007    the bytes of a *part*: piece after piece, aligned to 64 bytes
    checkpoints/<step>-r<round>.<n>/manifest.json which bytes of which part are which tensor

A part is an object of its own, written once, by one rank, and never changed. It may belong to several checkpoints: what
has not changed since the last one is referred to, and not written again. So a part's key names its own folder.

Each part has a digest for every ``BLOCK_BYTES``, so that a reader that needs a slice can verify that slice. The digest
of the manifest is in the ledger. Digests find damage; they do not keep out whoever may write to the bucket.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

import msgspec
import xxhash

from gpuctl.cluster.errors import CorruptRecord, Damaged
from gpuctl.cluster.records.checkpoints import CheckpointEntry
from gpuctl.cluster.records.codec import decode
from gpuctl.cluster.storage.interface import Store

MANIFEST = "manifest.json"
BLOCK_BYTES = 1 << 20
"""What a processor keeps in its cache between verifying and copying. The digests are a part in 30,000 of it all."""
FORMAT = 2


class Part(msgspec.Struct, frozen=True, omit_defaults=True):
    """An object in the bucket."""

    key: str
    """Below the job's checkpoint folder."""
    size: int
    blocks: tuple[str, ...]
    """Digest of each ``BLOCK_BYTES``, the last one of what remains."""
    nodes: tuple[str, ...] = ()
    """Those whose disk had a copy when this checkpoint was committed (see ``replica_layout``)."""


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive bytes within a part."""

    part: int
    """Index into ``Manifest.parts``."""
    at: int
    size: int


class Chunk(msgspec.Struct, frozen=True):
    """A box of a tensor (all of it, or a shard) in row-major order, little-endian, cut into pieces."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    pieces: tuple[Piece, ...]


class TensorIndex(msgspec.Struct, frozen=True):
    dtype: str
    """torch's name for it, without ``torch.``."""
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of a checkpoint, ``manifest.json``. Tensors have dotted names; values are JSON documents: the
    skeleton of everything that is no tensor in ``@plain`` and each rank's random number generators in ``@rng.<rank>``.
    """

    step: int
    parts: tuple[Part, ...]
    tensors: dict[str, TensorIndex]
    values: dict[str, tuple[Piece, ...]]
    format: int = FORMAT

    def keys(self) -> set[str]:
        """The keys of all parts."""
        return {part.key for part in self.parts}


def digest(data: bytes | bytearray | memoryview) -> str:
    """xxh3 with 128 bits: 24 GB/s on one core where SHA-256 makes 1.8, so that it costs the training nothing."""
    return xxhash.xxh3_128_hexdigest(data)


def blocks_of(size: int) -> Iterator[tuple[int, int]]:
    """Begin and end of each block of a part."""
    return pairwise([*range(0, size, BLOCK_BYTES), size])


def manifest_key(entry: CheckpointEntry) -> str:
    return f"{entry.path}/{MANIFEST}"


def read_manifest(store: Store, entry: CheckpointEntry) -> Manifest:
    """Read the manifest of a committed checkpoint; ``store`` shows the job's checkpoint folder.

    Raises ``Damaged`` if it is missing, or is not what was committed, or is of a format that this version cannot read.
    """
    key = manifest_key(entry)
    data = store.get(key)
    if data is None:
        raise Damaged(f"{key} is missing")
    if digest(data) != entry.digest:
        raise Damaged(f"{key} is not what was written")
    try:
        manifest = decode(data, Manifest, key)
    except CorruptRecord as error:
        raise Damaged(error.message, error.hint) from error
    if manifest.format != FORMAT:
        raise Damaged(f"{key} has format {manifest.format}, not {FORMAT}", "use the version of gpuctl that wrote it")
    _check(manifest, key)
    return manifest


def _check(manifest: Manifest, key: str) -> None:
    """All pieces lie within their parts and make up their chunks, and no key leads out of the checkpoint folder."""
    for part in manifest.parts:
        if part.key.startswith("/") or ".." in part.key.split("/"):
            raise Damaged(f"{key} names a part outside of the checkpoint folder: {part.key!r}")
        if len(part.blocks) != len(list(blocks_of(part.size))):
            raise Damaged(f"{key} has {len(part.blocks)} digests for the {part.size} bytes of {part.key}")
    for piece in _pieces(manifest):
        if not 0 <= piece.part < len(manifest.parts):
            raise Damaged(f"{key} refers to part {piece.part} of {len(manifest.parts)}")
        if piece.at < 0 or piece.size < 0 or piece.at + piece.size > manifest.parts[piece.part].size:
            raise Damaged(f"{key} refers to bytes past the end of {manifest.parts[piece.part].key}")


def _pieces(manifest: Manifest) -> Iterable[Piece]:
    for tensor in manifest.tensors.values():
        for chunk in tensor.chunks:
            yield from chunk.pieces
    for pieces in manifest.values.values():
        yield from pieces
