"""A checkpoint's files in the bucket, as the storage layer that ``torch.distributed.checkpoint`` plans for.

Below one folder: ``tensors-<rank>-<n>.bin`` (raw tensors, one after another, each aligned to 64 bytes, little-endian),
``values-<rank>.bin`` (everything that is no tensor, as JSON), and ``index.json``, which says where each of them is.
No pickle is written or read. Every rank puts its own files, several at once and unconditionally: nothing refers to them
until rank 0 commits the checkpoint (see ``commits``).
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint import (
    BytesStorageMetadata,
    LoadPlan,
    LoadPlanner,
    Metadata,
    SavePlan,
    SavePlanner,
    StorageReader,
    StorageWriter,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from gpuctl.cluster.bucket import Store
from gpuctl.cluster.errors import GpuctlError
from gpuctl.cluster.records import CheckpointEntry, decode

INDEX = "index.json"
_FILE_BYTES = 64 << 20
"""Size at which a rank begins another file: it bounds what a reader holds, and lets files travel in parallel."""
_THREADS = 8
_ALIGN = 64


class Damaged(GpuctlError):
    """A file of a committed checkpoint is missing or is not what was written."""


class Span(msgspec.Struct, frozen=True):
    """Where some bytes are."""

    file: str
    at: int
    size: int


class Chunk(msgspec.Struct, frozen=True):
    """A box of a tensor: all of it, or a shard."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    span: Span


class TensorIndex(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


class Index(msgspec.Struct, frozen=True):
    """``index.json``."""

    tensors: dict[str, TensorIndex]
    values: dict[str, Span]
    format: int = 1


@dataclass(frozen=True, slots=True)
class _Written:
    """What a rank tells rank 0 of one item: where it went, and the digest of that file."""

    span: Span
    sha256: str
    file_bytes: int


class BucketWriter(StorageWriter):
    """Writes one checkpoint below the folder ``path``. On rank 0, ``commit`` gets the size and the digests of all files
    when they are all there; what it raises is raised on every rank."""

    def __init__(self, store: Store, path: str, rank: int, commit: Callable[[int, dict[str, str]], None]) -> None:
        self._store = store
        self._path = path
        self._rank = rank
        self._commit = commit

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        files = [_File(f"values-{self._rank:05d}.bin")]
        indices: list[tuple[MetadataIndex, Span]] = []
        for item in plan.items:
            data = planner.resolve_data(item)
            if item.type == WriteItemType.BYTE_IO:
                assert isinstance(data, io.BytesIO)
                indices.append((item.index, files[0].add(data.getbuffer())))
                continue
            assert isinstance(data, torch.Tensor)
            if len(files) == 1 or files[-1].size >= _FILE_BYTES:
                files.append(_File(f"tensors-{self._rank:05d}-{len(files) - 1:03d}.bin"))
            indices.append((item.index, files[-1].add(_bytes_of(data))))
        written = dict(_in_parallel(self._put, [file for file in files if file.parts]))
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(index, span.size, _Written(span, *written[span.file])) for index, span in indices])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        written = {result.index: result.storage_data for rank in results for result in rank}
        index = msgspec.json.encode(_index(metadata, {where: w.span for where, w in written.items()}))
        self._store.put(f"{self._path}/{INDEX}", index)
        files = {w.span.file: w for w in written.values()}
        digests = {name: w.sha256 for name, w in sorted(files.items())} | {INDEX: _sha256(index)}
        self._commit(sum(w.file_bytes for w in files.values()) + len(index), digests)

    def _put(self, file: _File) -> tuple[str, tuple[str, int]]:
        data = file.content()
        self._store.put(f"{self._path}/{file.name}", data)
        return file.name, (_sha256(data), len(data))

    def reset(self, checkpoint_id: object = None) -> None: ...

    def set_up_storage_writer(self, is_coordinator: bool, *_args: Any, **_kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        return checkpoint_id is None


class BucketReader(StorageReader):
    """Reads one committed checkpoint. Whatever it reads is checked against the commit's digests first.

    Every method raises ``Damaged`` if a file is missing or differs.
    """

    def __init__(self, store: Store, entry: CheckpointEntry) -> None:
        self._store = store
        self.entry = entry
        self._index: Index | None = None

    def index(self) -> Index:
        if self._index is None:
            self._index = decode(self._file(INDEX), Index, f"{self.entry.path}/{INDEX}")
        return self._index

    def value(self, name: str) -> Any:
        """A value that is no tensor, or ``None`` if the checkpoint has none of that name."""
        span = self.index().values.get(name)
        return None if span is None else json.loads(self._file(span.file)[span.at : span.at + span.size])

    def metadata(self) -> Metadata:
        """The index, in the planner's words."""
        known: dict[str, Any] = dict.fromkeys(self.index().values, BytesStorageMetadata())
        for name, tensor in self.index().tensors.items():
            chunks = [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in tensor.chunks]
            known[name] = TensorStorageMetadata(TensorProperties(dtype_of(tensor)), torch.Size(tensor.shape), chunks)
        return Metadata(known)

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        # An error raised here would reach the caller as "metadata is None" (state_dict_loader.py), so the load planner
        # asks for metadata() itself, one call later, where errors are passed on as they are.
        return Metadata({})

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        files: dict[str, list[tuple[ReadItem, Chunk]]] = {}
        for item in plan.items:
            chunk = self._chunk(item.storage_index)
            files.setdefault(chunk.span.file, []).append((item, chunk))
        _in_parallel(lambda file: self._read(file[0], file[1], planner), list(files.items()))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, name: str, items: list[tuple[ReadItem, Chunk]], planner: LoadPlanner) -> None:
        # torch makes no tensor of no bytes; where all spans are empty, one byte is enough to cut them from.
        content = torch.frombuffer(bytearray(self._file(name) or b"\0"), dtype=torch.uint8)
        for item, chunk in items:
            raw = content[chunk.span.at : chunk.span.at + chunk.span.size]
            source = raw.view(dtype_of(self.index().tensors[item.storage_index.fqn])).reshape(chunk.sizes)
            for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                source = source.narrow(dim, offset, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(source)
            planner.commit_tensor(item, target)

    def _chunk(self, where: MetadataIndex) -> Chunk:
        for chunk in self.index().tensors[where.fqn].chunks:
            if where.offset is None or tuple(where.offset) == chunk.offsets:
                return chunk
        raise Damaged(f"the index of checkpoint {self.entry.path} has no part of {where.fqn!r} at {where.offset}")

    def _file(self, name: str) -> bytes:
        data = self._store.get(f"{self.entry.path}/{name}")
        if data is None:
            raise Damaged(f"{self.entry.path}/{name} is missing")
        if _sha256(data) != self.entry.sha256.get(name):
            raise Damaged(f"{self.entry.path}/{name} is not what was written")
        return data

    def reset(self, checkpoint_id: object = None) -> None: ...

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_args: Any, **_kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        return checkpoint_id is None


def dtype_of(tensor: TensorIndex) -> torch.dtype:
    found = getattr(torch, tensor.dtype, None)
    if not isinstance(found, torch.dtype):
        raise Damaged(f"this torch knows no dtype {tensor.dtype!r}", "use the version that wrote the checkpoint")
    return found


class _File:
    """A file that is being put together in host memory."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.size = 0
        self.parts: list[Any] = []

    def add(self, data: Any) -> Span:
        padding = -self.size % _ALIGN
        span = Span(self.name, self.size + padding, len(data))
        self.parts += [bytes(padding), data]
        self.size = span.at + span.size
        return span

    def content(self) -> bytes:
        return b"".join(self.parts)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]  # numpy's stubs lag behind PEP 688


def _index(metadata: Metadata, spans: dict[MetadataIndex, Span]) -> Index:
    tensors: dict[str, TensorIndex] = {}
    values: dict[str, Span] = {}
    for name, known in metadata.state_dict_metadata.items():
        if isinstance(known, BytesStorageMetadata):
            values[name] = spans[MetadataIndex(name)]
            continue
        chunks = tuple(
            Chunk(tuple(c.offsets), tuple(c.sizes), spans[MetadataIndex(name, c.offsets)]) for c in known.chunks
        )
        tensors[name] = TensorIndex(str(known.properties.dtype).removeprefix("torch."), tuple(known.size), chunks)
    return Index(tensors, values)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _in_parallel(call: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
    items = list(items)
    if len(items) <= 1:
        return [call(item) for item in items]
    with ThreadPoolExecutor(min(_THREADS, len(items)), "gpuctl-checkpoint") as pool:
        return list(pool.map(call, items))
