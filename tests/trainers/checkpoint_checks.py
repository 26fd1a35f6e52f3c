"""Whether the checkpoints in a bucket are whole, for readers meanwhile and for whoever comes next."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from gpuctl import Checkpointer
from gpuctl.cluster.agreement import ledgers
from gpuctl.cluster.checkpoints.block_reader import read_block
from gpuctl.cluster.checkpoints.commit_log import needed_by
from gpuctl.cluster.checkpoints.manifest import read_manifest
from gpuctl.cluster.errors import Damaged, StoreUnavailable
from gpuctl.cluster.records.checkpoints import CheckpointEntry
from gpuctl.cluster.storage.bucket import Bucket, open_bucket
from tests.trainers.rank_scripts.named_steps import at_step, is_at


def copied(source: Bucket, url: str) -> str:
    target = open_bucket(url)
    for item in source.list(""):
        target.put(item.key, source.get(item.key) or b"")
    return url


def committed(store: Bucket) -> tuple[CheckpointEntry, ...]:
    log = ledgers.checkpoints_in(store).read().value
    return log.entries if log else ()


def objects(store: Bucket) -> set[str]:
    """Besides the ledger."""
    return {item.key for item in store.list("") if not item.key.startswith("ledger/")}


def torn(store: Bucket) -> str:
    """What a reader finds wrong with a checkpoint that the log names, or nothing."""
    for entry in committed(store):
        try:
            for part in read_manifest(store, entry).parts:
                for number in range(len(part.blocks)):
                    read_block(store, part, number)
        except Damaged as damaged:
            if entry in committed(store):  # else it was dropped meanwhile, and is being deleted
                return f"step {entry.step}: {damaged}"
    return ""


@contextmanager
def read_meanwhile(url: str, every_s: float = 0.03) -> Iterator[None]:
    """Somebody reads all that is committed, again and again, and never finds a checkpoint that is not whole."""
    over, found, looks = threading.Event(), [""], itertools.count()

    def read() -> None:
        store = open_bucket(url)
        while not found[0]:
            with contextlib.suppress(StoreUnavailable):  # killed just now, or away
                found[0] = torn(store)
                next(looks)
            if over.wait(every_s):
                return

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield
    finally:
        over.set()
        reader.join()
    assert not found[0]
    assert next(looks) > 0


def goes_on(url: str, steps: set[int], told: object) -> None:
    """One rank, which was not there before, finds one of ``steps`` as it was, and saves the next. That sweeps what the
    dead have left."""
    store, state = open_bucket(url), at_step(0)
    newest = committed(store)[-1].step
    checkpointer = Checkpointer(store=store, keep=1)
    assert checkpointer.restore(state) == newest, told
    assert newest in steps, told
    assert is_at(newest, state), told
    checkpointer.save(newest + 1, at_step(newest + 1))
    checkpointer.wait()
    (entry,) = committed(store)
    assert entry.step == newest + 1, told
    assert objects(store) == needed_by(store, [entry]), told
