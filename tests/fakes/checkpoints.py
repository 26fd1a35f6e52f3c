"""Checkpoints as the ranks of a job write them, put together by hand: no torch, any layout."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

from gpuctl.cluster.checkpoints.commit_log import CommitLog, folder_of
from gpuctl.cluster.checkpoints.manifest import (
    Chunk,
    Manifest,
    Part,
    Piece,
    TensorIndex,
    blocks_of,
    digest,
    read_manifest,
)
from gpuctl.cluster.checkpoints.retention import Retention
from gpuctl.cluster.records.checkpoints import CheckpointEntry
from gpuctl.cluster.storage.interface import Store

ALIGN = 64
MARK = "m"


@dataclass(frozen=True)
class Raw:
    """A tensor: its bytes in row-major order. ``grid`` says into how many shards each dimension is cut."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes
    grid: tuple[int, ...] = ()
    array: bool = False


def of_bytes(data: bytes) -> Raw:
    return Raw("uint8", (len(data),), data)


class Maker:
    """Commits checkpoints to the folder that ``store`` shows."""

    def __init__(self, store: Store, *, part_bytes: int = 16 << 20) -> None:
        self.store = store
        self.part_bytes = part_bytes

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        number: int = 1,
        *,
        attempt: int = 1,
        base: CheckpointEntry | None = None,
        reason: Literal["asked", "interval", "notice"] = "interval",
        metrics: dict[str, float] | None = None,
        at: float | None = None,
        nodes: tuple[str, ...] = (),
    ) -> CheckpointEntry:
        """One of round ``number``. Parts that are as in ``base`` are not written again."""
        manifest, written = self.write(step, state, number, attempt, base)
        entry = CheckpointEntry(
            step=step,
            round=number,
            path=folder_of(step, number, MARK, attempt),
            digest="",
            bytes=sum(part.size for part in manifest.parts),
            written=written,
            world=2,
            at=time.time() if at is None else at,
            reason=reason,
            metrics=metrics or {},
            nodes=nodes,
        )
        commits = CommitLog(self.store, number, Retention(last=None))
        commits.begin()
        return commits.commit(entry, manifest, base.path if base else None)

    def write(
        self, step: int, state: Mapping[str, Any], number: int, attempt: int = 1, base: CheckpointEntry | None = None
    ) -> tuple[Manifest, int]:
        """Its parts, which nothing refers to yet. Returns the manifest, not written, and the bytes of the new parts."""
        buffer = bytearray()
        spots: dict[str, tuple[Raw, list[tuple[tuple[int, ...], tuple[int, ...], int, int]]]] = {}
        documents = {f"@rng.{rank}": json.dumps([rank, 0.5]).encode() for rank in range(2)}
        for item, value in state.items():
            tensors: dict[str, Raw] = {}
            documents[f"@plain.{item}"] = json.dumps(pack(value, item, tensors)).encode()
            for name, raw in tensors.items():
                spots[name] = raw, [(o, s, *_add(buffer, data)) for o, s, data in shards(raw)]
        values = {name: _add(buffer, data) for name, data in documents.items()}
        known = {(p.size, p.blocks): p for p in (read_manifest(self.store, base).parts if base else ())}
        parts, written = [], 0
        for index, begin in enumerate(range(0, len(buffer), self.part_bytes)):
            data = bytes(buffer[begin : begin + self.part_bytes])
            blocks = tuple(digest(data[low:high]) for low, high in blocks_of(len(data)))
            key = f"{folder_of(step, number, MARK, attempt)}/{index % 2:05d}-{index:04d}"
            part = known.get((len(data), blocks)) or Part(key, len(data), blocks)
            if part.key == key:
                self.store.put(key, data)
                written += len(data)
            parts.append(part)
        index_of = {
            name: TensorIndex(raw.dtype, raw.shape, tuple(Chunk(o, s, self._pieces(at, n)) for o, s, at, n in chunks))
            for name, (raw, chunks) in spots.items()
        }
        documents_at = {name: self._pieces(at, n) for name, (at, n) in values.items()}
        return Manifest(step=step, parts=tuple(parts), tensors=index_of, values=documents_at), written

    def _pieces(self, at: int, size: int) -> tuple[Piece, ...]:
        found = []
        while size > 0:
            part, low = divmod(at, self.part_bytes)
            length = min(size, self.part_bytes - low)
            found.append(Piece(part, low, length))
            at, size = at + length, size - length
        return tuple(found)


def pack(value: Any, name: str, tensors: dict[str, Raw]) -> Any:
    """As ``trainers.plain`` does."""
    if isinstance(value, Raw):
        tensors[name] = value
        return {"kind": "array" if value.array else "tensor", "of": name}
    if isinstance(value, list):
        return [pack(item, f"{name}.{i}", tensors) for i, item in enumerate(value)]
    if isinstance(value, tuple):
        return {"kind": "tuple", "of": [pack(item, f"{name}.{i}", tensors) for i, item in enumerate(value)]}
    if isinstance(value, dict):
        return {"kind": "dict", "of": [[k, pack(v, f"{name}.{k}", tensors)] for k, v in value.items()]}
    return value


def shards(raw: Raw) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], bytes]]:
    """Offsets, sizes and bytes of each."""
    if not raw.grid:
        yield (0,) * len(raw.shape), raw.shape, raw.data
        return
    grid = raw.grid
    width = len(raw.data) // max(1, _product(raw.shape))
    cuts = [[n * i // g for i in range(g + 1)] for n, g in zip(raw.shape, grid, strict=True)]
    for place in product(*(range(g) for g in grid)):
        offsets = tuple(cut[i] for cut, i in zip(cuts, place, strict=True))
        sizes = tuple(cut[i + 1] - cut[i] for cut, i in zip(cuts, place, strict=True))
        data = bytearray()
        for row in product(*(range(o, o + n) for o, n in zip(offsets[:-1], sizes[:-1], strict=True))):
            at = _flat((*row, offsets[-1]), raw.shape) * width
            data += raw.data[at : at + sizes[-1] * width]
        yield offsets, sizes, bytes(data)


def _flat(index: Sequence[int], shape: Sequence[int]) -> int:
    flat = 0
    for i, n in zip(index, shape, strict=True):
        flat = flat * n + i
    return flat


def _product(numbers: Sequence[int]) -> int:
    found = 1
    for n in numbers:
        found *= n
    return found


def _add(buffer: bytearray, data: bytes) -> tuple[int, int]:
    buffer += bytes(-len(buffer) % ALIGN)
    at = len(buffer)
    buffer += data
    return at, len(data)
