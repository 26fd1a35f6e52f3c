"""Reads of a checkpoint, without a bucket."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan

from gpuctl.cluster.checkpoints.manifest import BLOCK_BYTES, Chunk, Manifest, Part, Piece, TensorIndex, digest
from gpuctl.cluster.errors import Damaged
from gpuctl.trainers.checkpoint.load.reader import load, read_values
from gpuctl.trainers.checkpoint.load.sources import Parts
from gpuctl.trainers.checkpoint.state.load_targets import metadata_of

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


class Half:
    """A disk that was full: it has the beginning of a part."""

    name = "the disk"

    def read(self, part: Part, low: int, high: int) -> Iterator[memoryview]:
        yield memoryview(long_bytes())[low : min(high, part.size, BLOCK_BYTES)]


class Whole:
    """The bucket, which tells what it was asked for."""

    name = "the bucket"

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def read(self, part: Part, low: int, high: int) -> Iterator[memoryview]:
        self.asked.append((low, high))
        yield memoryview(long_bytes())[low : min(high, part.size)]


def long_bytes() -> bytes:
    return b"".join(bytes([number]) * BLOCK_BYTES for number in range(3))


def test_what_a_source_has_no_more_of_comes_from_the_next_one() -> None:
    data, bucket = long_bytes(), Whole()
    blocks = tuple(digest(data[low : low + BLOCK_BYTES]) for low in range(0, len(data), BLOCK_BYTES))
    parts = Parts([Half(), bucket])
    read = [(at, bytes(block), whole) for at, block, whole in parts.read(Part("0", len(data), blocks), 0, len(data))]
    assert read == [(low, data[low : low + BLOCK_BYTES], True) for low in range(0, len(data), BLOCK_BYTES)]
    assert bucket.asked == [(BLOCK_BYTES, len(data))]
    assert parts.served == {"the disk": BLOCK_BYTES, "the bucket": 2 * BLOCK_BYTES}


class Wire:
    """A source that sends what it has in small pieces of odd sizes, each in the same memory."""

    def __init__(self, name: str, data: bytes, piece: int = 300_007) -> None:
        self.name = name
        self._data = data
        self._piece = piece

    def read(self, part: Part, low: int, high: int) -> Iterator[memoryview]:
        room = bytearray(self._piece)
        for at in range(low, min(high, part.size, len(self._data)), self._piece):
            piece = self._data[at : min(high, at + self._piece)]
            room[: len(piece)] = piece
            yield memoryview(room)[: len(piece)]


def drawn() -> bytes:
    """Three blocks and a half."""
    return random.Random(0).randbytes(7 * BLOCK_BYTES // 2)


def layout(data: bytes) -> tuple[Manifest, dict[str, torch.Tensor]]:
    """Tensors side by side in one part that holds ``data``, and what each of them is: one that ends within the second
    block, a single number, one that lies elsewhere in memory than in the part, and one to the end."""
    words = torch.frombuffer(bytearray(data), dtype=torch.int32)
    ends = [300_000, 300_001, 300_001 + 1000 * 100, len(words)]
    shapes = {"first": (300_000,), "number": (), "turned": (1000, 100), "rest": (ends[3] - ends[2],)}
    tensors, expected, low = {}, {}, 0
    for (name, shape), end in zip(shapes.items(), ends, strict=True):
        piece = Piece(0, 4 * low, 4 * (end - low))
        tensors[name] = TensorIndex("int32", shape, (Chunk((0,) * len(shape), shape, (piece,)),))
        expected[name] = words[low:end].reshape(shape)
        low = end
    blocks = tuple(digest(data[at : at + BLOCK_BYTES]) for at in range(0, len(data), BLOCK_BYTES))
    values: dict[str, tuple[Piece, ...]] = {"@plain.count": (Piece(0, 5, 3), Piece(0, BLOCK_BYTES - 1, 2))}
    return Manifest(step=1, parts=(Part("0", len(data), blocks),), tensors=tensors, values=values), expected


def loaded(of: Manifest, sources: Sequence[Wire | Whole]) -> tuple[dict[str, torch.Tensor], Parts]:
    found = {name: torch.zeros(tensor.shape, dtype=torch.int32) for name, tensor in of.tensors.items()}
    found["turned"] = torch.zeros(100, 1000, dtype=torch.int32).t()
    items = create_default_local_load_plan(found, metadata_of(of, of.tensors)).items
    parts = Parts(sources)
    load(of, items, lambda item: found[item.dest_index.fqn], parts, 1)
    return found, parts


@pytest.mark.parametrize("piece", [4099, 300_007, 3 * BLOCK_BYTES + 5])
def test_pieces_of_any_size_end_up_where_they_belong(piece: int) -> None:
    of, expected = layout(drawn())
    found, _ = loaded(of, [Wire("the wire", drawn(), piece)])
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("block", range(4))
@pytest.mark.parametrize("harm", ["flipped", "cut"])
def test_a_block_that_lay_in_a_tensor_before_it_was_found_damaged_comes_again(block: int, harm: str) -> None:
    data = drawn()
    of, expected = layout(data)
    at = block * BLOCK_BYTES + 400_000
    bad = data[:at] if harm == "cut" else data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
    found, parts = loaded(of, [Wire("the wire", bad), Wire("the bucket", data)])
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert parts.served == {"the wire": block * BLOCK_BYTES, "the bucket": len(data) - block * BLOCK_BYTES}
    with pytest.raises(Damaged, match="is cut short" if harm == "cut" else "is not what was written"):
        loaded(of, [Wire("the wire", bad)])


def test_values_that_lie_apart_are_read_at_once() -> None:
    data, names = drawn(), ["@plain.count", "@plain.missing"]
    of, _ = layout(data)
    asked: list[int] = []

    class Counted(Wire):
        def read(self, part: Part, low: int, high: int) -> Iterator[memoryview]:
            asked.append(low)
            return super().read(part, low, high)

    values = read_values(of, names, Parts([Counted("the wire", data)]))
    assert values == {"@plain.count": data[5:8] + data[BLOCK_BYTES - 1 : BLOCK_BYTES + 1]}
    assert asked == [0]
