"""One block of a part (see ``manifest``), read from the bucket and checked against its digest."""

from __future__ import annotations

from gpuctl.cluster.checkpoints.manifest import BLOCK_BYTES, Part, digest
from gpuctl.cluster.errors import Damaged
from gpuctl.cluster.storage.bucket import Bucket


def read_block(store: Bucket, part: Part, number: int) -> memoryview:
    """Raises ``Damaged`` if it is missing or is not what was written."""
    begin, end = bounds(part, number)
    try:
        data = store.get_range(part.key, begin, end)
    except FileNotFoundError as error:
        raise Damaged(f"{part.key} is missing") from error
    if digest(data) != part.blocks[number]:
        raise Damaged(f"{part.key} is not what was written: bytes {begin} to {end} differ")
    return data


def bounds(part: Part, number: int) -> tuple[int, int]:
    """Where block ``number`` begins and ends."""
    begin = number * BLOCK_BYTES
    return begin, min(part.size, begin + BLOCK_BYTES)
