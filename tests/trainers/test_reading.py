"""Reads of a checkpoint, without a bucket."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan

from gpuctl.cluster.errors import Damaged
from gpuctl.cluster.manifest import Chunk, Manifest, Part, Piece, TensorIndex, digest
from gpuctl.trainers.reading import Parts, load
from gpuctl.trainers.state import metadata_of

COUNT = 20


class Source:
    """A place that lacks some parts, and knows which ones it was asked for."""

    name = "the source"

    def __init__(self, lacks: set[str]) -> None:
        self._lacks = lacks
        self.asked: list[str] = []

    def read(self, part: Part, low: int, high: int) -> Iterator[memoryview]:
        self.asked.append(part.key)
        if part.key not in self._lacks:
            yield memoryview(bytes_of(part.key))[low:high]


def bytes_of(key: str) -> bytes:
    return bytes([int(key)]) * 8


def manifest() -> Manifest:
    """Of a tensor of eight bytes in each part."""
    keys = [str(number) for number in range(COUNT)]
    return Manifest(
        step=1,
        parts=tuple(Part(key, 8, (digest(bytes_of(key)),)) for key in keys),
        tensors={
            key: TensorIndex("uint8", (8,), (Chunk((0,), (8,), (Piece(number, 0, 8),)),))
            for number, key in enumerate(keys)
        },
        values={},
    )


def load_from(source: Source, threads: int) -> dict[str, torch.Tensor]:
    of = manifest()
    found: dict[str, torch.Tensor] = {key: torch.zeros(8, dtype=torch.uint8) for key in of.tensors}
    items = create_default_local_load_plan(found, metadata_of(of, of.tensors)).items
    load(of, items, lambda item: found[item.dest_index.fqn], Parts([source]), threads)
    return found


def test_every_part_is_read_once() -> None:
    source = Source(set())
    found = load_from(source, 3)
    assert {key: tensor.tolist() for key, tensor in found.items()} == {key: list(bytes_of(key)) for key in found}
    assert sorted(source.asked) == sorted(found)


def test_once_a_part_is_missing_nothing_more_is_read() -> None:
    source = Source({"2", "7"})
    with pytest.raises(Damaged, match=r"^2 is missing$"):
        load_from(source, 1)
    assert source.asked == ["0", "1", "2"]


def test_nothing_to_load_is_nothing_to_do() -> None:
    load(manifest(), [], lambda _: torch.empty(0), Parts([Source(set())]), 2)
