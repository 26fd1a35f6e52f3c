"""Checkpoints of one job, each of which refers to parts of the one before."""

from __future__ import annotations

import random

from gpuctl.cluster.checkpoints import listing, verification
from gpuctl.cluster.records.checkpoints import CheckpointEntry
from gpuctl.cluster.storage.bucket import Bucket
from tests.fakes.checkpoints import Maker, of_bytes

JOB = "digits-1"
FROZEN = {"backbone": of_bytes(random.Random(0).randbytes(10_240))}


def state(step: int) -> dict[str, object]:
    """Most of it never changes."""
    return {"model": {**FROZEN, "head": of_bytes(bytes([step % 256]) * 3000)}}


def chain(maker: Maker, *steps: int, number: int = 1) -> list[CheckpointEntry]:
    """Each refers to the frozen parts of the one before."""
    made: list[CheckpointEntry] = []
    for step in steps:
        made.append(maker.save(step, state(step), number, base=made[-1] if made else None))
    return made


def objects(maker: Maker) -> dict[str, int]:
    """Sizes of all objects but the ledger's."""
    return {item.key: item.size for item in maker.store.list("") if not item.key.startswith("ledger/")}


def faults(found: list[verification.CheckpointCheck]) -> dict[int, list[str]]:
    return {one.entry.step: [fault.what for fault in one.faults] for one in found}


def entries(store: Bucket) -> tuple[CheckpointEntry, ...]:
    return listing.committed(store, JOB)


def flip(maker: Maker, key: str, at: int) -> None:
    data = bytearray(maker.store.get(key) or b"")
    data[at] ^= 1
    maker.store.put(key, bytes(data))
