"""Streams on storage that cannot append."""

from __future__ import annotations

import json

import pytest

from gpuctl.cluster.errors import StoreUnavailable
from gpuctl.cluster.storage.bucket import Bucket, open_bucket
from gpuctl.cluster.storage.streams import ChunkWriter, StreamReader


@pytest.fixture
def bucket(bucket_url: str) -> Bucket:
    return open_bucket(bucket_url)


def _lines(*numbers: int) -> bytes:
    return b"".join(json.dumps({"n": n}).encode() + b"\n" for n in numbers)


def _read(reader: StreamReader, number: int | None = None, node: str | None = None) -> list[tuple[int, str, int]]:
    return [(round_, name, line["n"]) for round_, name, line in reader.read(number=number, node=node)]


def test_what_was_appended_is_read_once_and_in_order(bucket: Bucket) -> None:
    writer, reader = ChunkWriter(bucket, "logs/000001/node-0"), StreamReader(bucket, "logs")
    assert _read(reader) == []
    writer.append(_lines(1, 2))
    assert _read(reader) == [(1, "node-0", 1), (1, "node-0", 2)]
    writer.append(_lines(3))
    assert _read(reader) == [(1, "node-0", 3)]
    assert _read(reader) == []


def test_a_chunk_that_is_full_is_followed_by_another(bucket: Bucket) -> None:
    writer = ChunkWriter(bucket, "logs/000001/node-0", chunk_bytes=40)
    for n in range(20):
        writer.append(_lines(n))
    assert len(bucket.list("logs")) > 3
    assert [n for _, _, n in _read(StreamReader(bucket, "logs"))] == list(range(20))


def test_rounds_and_nodes_are_told_apart(bucket: Bucket) -> None:
    ChunkWriter(bucket, "logs/000001/node-0").append(_lines(1))
    ChunkWriter(bucket, "logs/000001/node-1").append(_lines(2))
    ChunkWriter(bucket, "logs/000002/node-0").append(_lines(3))
    assert _read(StreamReader(bucket, "logs"), number=1) == [(1, "node-0", 1), (1, "node-1", 2)]
    assert _read(StreamReader(bucket, "logs"), node="node-0") == [(1, "node-0", 1), (2, "node-0", 3)]
    assert _read(StreamReader(bucket, "logs"), number=2, node="node-1") == []


def test_lines_that_could_not_be_sent_go_with_the_next() -> None:
    class Failing:
        def __init__(self) -> None:
            self.fails = True
            self.kept: dict[str, bytes] = {}

        def put(self, key: str, data: bytes) -> None:
            if self.fails:
                raise StoreUnavailable("no answer")
            self.kept[key] = data

    store = Failing()
    writer = ChunkWriter(store, "logs/000001/node-0")  # type: ignore[arg-type]  # a writer puts and does nothing else
    with pytest.raises(StoreUnavailable):
        writer.append(_lines(1))
    store.fails = False
    writer.append(_lines(2))
    assert store.kept == {"logs/000001/node-0/00000001.jsonl": _lines(1, 2)}
