"""Tensors put together from shards, parts and blocks, whatever the cuts."""

from __future__ import annotations

import random
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuctl.cluster.checkpoints import listing
from gpuctl.cluster.checkpoints.export.reassembly import Reassembly, tensor_of
from gpuctl.cluster.checkpoints.manifest import BLOCK_BYTES, Chunk, Manifest, Piece, TensorIndex, read_manifest
from gpuctl.cluster.errors import Damaged
from gpuctl.cluster.storage.bucket import open_bucket
from tests.fakes.checkpoints import Maker, Raw


def maker_in(folder: str | Path, part_bytes: int) -> Maker:
    return Maker(listing.folder(open_bucket(f"file://{folder}"), "job"), part_bytes=part_bytes)


def assembled(maker: Maker, manifest: Manifest, names: list[str]) -> tuple[bytes, int]:
    """The tensors one after the other, and how many bytes were read for them."""
    assembly = Reassembly(maker.store, manifest)  # type: ignore[arg-type]
    read: list[int] = []
    with TemporaryFile() as file:
        at = 7
        for name in names:
            assembly.add_tensor(name, file.fileno(), at)
            at += sum(piece.size for chunk in manifest.tensors[name].chunks for piece in chunk.pieces)
        assembly.fetch(read.append)
        assert sum(read) == assembly.bytes
        file.seek(7)
        return file.read(), sum(read)


@st.composite
def raws(draw: st.DrawFn) -> Raw:
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=4)))
    grid = tuple(draw(st.integers(1, 3)) for _ in shape)
    width = draw(st.sampled_from([1, 2, 4, 8]))
    data = random.Random(draw(st.integers(0, 9))).randbytes(prod(shape) * width)
    return Raw({1: "uint8", 2: "int16", 4: "float32", 8: "int64"}[width], shape, data, grid)


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(tensors=st.lists(raws(), min_size=1, max_size=4), part_bytes=st.integers(1, 300))
def test_every_byte_finds_its_place_however_it_was_cut(tensors: list[Raw], part_bytes: int) -> None:
    with TemporaryDirectory() as folder:
        maker = maker_in(folder, part_bytes)
        names = [f"model.{i}" for i in range(len(tensors))]
        entry = maker.save(1, {"model": {str(i): raw for i, raw in enumerate(tensors)}})
        found, _ = assembled(maker, read_manifest(maker.store, entry), names)
        assert found == b"".join(raw.data for raw in tensors)


@pytest.mark.parametrize("part_bytes", [16 << 20, 5 << 20, BLOCK_BYTES])
def test_tensors_that_lie_across_blocks_and_parts(tmp_path: Path, part_bytes: int) -> None:
    data = random.Random(1).randbytes(6 * 1_600_000)
    raw = Raw("int16", (6, 800_000), data, (2, 3))
    maker = maker_in(tmp_path, part_bytes)
    manifest = read_manifest(maker.store, maker.save(1, {"before": Raw("uint8", (100,), b"x" * 100), "model": raw}))
    assert assembled(maker, manifest, ["model"])[0] == data


def test_only_the_blocks_that_are_needed_are_read(tmp_path: Path) -> None:
    maker = maker_in(tmp_path, 1 << 30)
    small = Raw("uint8", (64,), bytes(range(64)))
    large = Raw("uint8", (5 * BLOCK_BYTES,), bytes(5 * BLOCK_BYTES))
    manifest = read_manifest(maker.store, maker.save(1, {"large": large, "small": small}))
    found, read = assembled(maker, manifest, ["small"])
    assert found == small.data
    assert read < BLOCK_BYTES


def test_no_byte_of_a_block_that_differs_is_used(tmp_path: Path) -> None:
    maker = maker_in(tmp_path, 1 << 20)
    entry = maker.save(1, {"model": Raw("uint8", (1000,), b"a" * 1000)})
    key = f"{entry.path}/00000-0000"
    maker.store.put(key, (maker.store.get(key) or b"")[:-1] + b"!")
    assembly = Reassembly(maker.store, read_manifest(maker.store, entry))  # type: ignore[arg-type]
    with (tmp_path / "file").open("wb") as file:
        assembly.add_tensor("model", file.fileno(), 0)
        with pytest.raises(Damaged, match=f"{key} is not what was written"):
            assembly.fetch(lambda _: None)
    assert (tmp_path / "file").read_bytes() == b""


def test_a_part_that_is_gone_is_missing(tmp_path: Path) -> None:
    maker = maker_in(tmp_path, 1 << 20)
    entry = maker.save(1, {"model": Raw("uint8", (1000,), b"a" * 1000)})
    manifest = read_manifest(maker.store, entry)
    maker.store.delete([f"{entry.path}/00000-0000"])
    assembly = Reassembly(maker.store, manifest)  # type: ignore[arg-type]
    assembly.add_value("@plain.model")
    with pytest.raises(Damaged, match="00000-0000 is missing"):
        assembly.fetch(lambda _: None)


WHOLE = TensorIndex("int16", (2, 3), (Chunk((0, 0), (2, 3), (Piece(0, 0, 12),)),))


@pytest.mark.parametrize(
    "chunks",
    [
        (),
        (Chunk((0, 0), (1, 3), (Piece(0, 0, 6),)),),
        (Chunk((0, 1), (2, 3), (Piece(0, 0, 12),)),),
        (Chunk((0,), (6,), (Piece(0, 0, 12),)),),
        (Chunk((0, 0), (1, 3), (Piece(0, 0, 2),)), Chunk((1, 0), (1, 3), (Piece(0, 2, 10),))),
        (Chunk((0, 0), (2, 3), (Piece(0, 0, 7),)),),
    ],
    ids=["none", "too few", "beyond the edge", "other dimensions", "uneven", "bits"],
)
def test_chunks_that_do_not_make_up_their_tensor_are_refused(chunks: tuple[Chunk, ...]) -> None:
    manifest = Manifest(step=1, parts=(), tensors={"w": WHOLE}, values={})
    assert tensor_of(manifest, "w") == WHOLE
    bad = replace(manifest, tensors={"w": replace(WHOLE, chunks=chunks)})
    with pytest.raises(Damaged, match="the chunks of tensor 'w' do not cover it exactly"):
        tensor_of(bad, "w")
    nothing = TensorIndex("int16", (0,), (Chunk((0,), (0,), (Piece(0, 0, 2),)),))
    with pytest.raises(Damaged, match="the chunks of tensor 'w' do not cover it exactly"):
        tensor_of(replace(manifest, tensors={"w": nothing}), "w")
    with pytest.raises(Damaged, match="no tensor 'v', which it refers to"):
        tensor_of(manifest, "v")
