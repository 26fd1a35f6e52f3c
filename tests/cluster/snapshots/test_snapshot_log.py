"""Sets of files in the bucket, whatever order several nodes and rounds do things in."""

from __future__ import annotations

import hashlib
import io
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuctl.cluster.agreement import ledgers
from gpuctl.cluster.clock import SystemClock
from gpuctl.cluster.errors import Fenced
from gpuctl.cluster.records.snapshots import StoredFile
from gpuctl.cluster.snapshots import snapshot_log
from gpuctl.cluster.snapshots.snapshot_log import Changes, FileChanged, SnapshotLog, merged
from gpuctl.cluster.storage.bucket import Bucket, open_bucket

JOB = "job-1"
BLOBS = f"jobs/{JOB}/files/blobs"


def sets_of(store: Bucket, number: int, rank: int) -> SnapshotLog:
    return SnapshotLog(store, JOB, number, rank, SystemClock())


def stored(sets: SnapshotLog, text: str) -> StoredFile:
    digest = hashlib.sha256(text.encode()).hexdigest()
    blob = sets.blob_of(digest) or sets.upload(io.BytesIO(text.encode()), len(text), digest, lambda: None)
    return StoredFile(size=len(text), sha256=digest, blob=blob)


def commit(sets: SnapshotLog, changes: Changes, texts: dict[str, str]) -> None:
    while missing := sets.commit(changes):
        changes.update({path: stored(sets, texts[path]) for path in missing})


def content(store: Bucket) -> dict[str, bytes | None]:
    newest = snapshot_log.newest(store, JOB)
    return {path: store.get(f"{BLOBS}/{file.blob}") for path, file in newest.files.items()} if newest else {}


def test_few_versions_of_a_long_listing_are_kept(file_url: str) -> None:
    store = open_bucket(file_url)
    node = sets_of(store, 1, 0)
    node.begin()
    for number in range(20):
        assert node.commit({f"{i}": stored(node, f"{i}") for i in range(number + 1)}) == []
    assert len(store.list(f"jobs/{JOB}/files/ledger")) == 8
    assert len(content(store)) == 20


@pytest.mark.slow
def test_commits_of_many_nodes_at_once_are_all_in_the_set(bucket_url: str) -> None:
    nodes = [sets_of(open_bucket(bucket_url), 1, rank) for rank in range(6)]
    for node in nodes:
        node.begin()

    def work(rank: int) -> None:
        for turn in range(3):
            texts = {f"of-{rank}": f"{rank} {turn}", "shared": f"by {rank} {turn}"}
            commit(nodes[rank], {path: stored(nodes[rank], text) for path, text in texts.items()}, texts)

    with ThreadPoolExecutor(len(nodes)) as pool:
        list(pool.map(work, range(len(nodes))))
    assert content(open_bucket(bucket_url)) == {f"of-{r}": f"{r} 2".encode() for r in range(6)} | {"shared": b"by 0 2"}


def test_a_blob_that_was_deleted_before_the_commit_that_counts_on_it_is_uploaded_anew(bucket_url: str) -> None:
    store = open_bucket(bucket_url)
    a, b = sets_of(store, 1, 0), sets_of(store, 1, 1)
    a.begin()
    commit(a, {"x": stored(a, "same")}, {"x": "same"})
    b.begin()
    counted_on = stored(b, "same")
    for text in ("2", "3"):
        commit(a, {"x": stored(a, text)}, {"x": text})
    assert store.get(f"{BLOBS}/{counted_on.blob}") is None
    assert b.commit({"y": counted_on}) == ["y"]
    commit(b, {"y": counted_on}, {"y": "same"})
    assert content(store) == {"x": b"3", "y": b"same"}


@pytest.mark.parametrize("size", [100, 9 << 20])
def test_a_file_that_is_written_to_while_it_is_uploaded_leaves_nothing(
    bucket_url: str, tmp_path: Path, size: int
) -> None:
    store, path = open_bucket(bucket_url), tmp_path / "file"
    path.write_bytes(bytes(size))
    sets = sets_of(store, 1, 0)
    sets.begin()

    def overwrite() -> None:
        with path.open("r+b") as other:
            other.seek(size - 1)
            other.write(b"x")

    with path.open("rb", buffering=0) as file, pytest.raises(FileChanged):
        sets.upload(file, size, hashlib.sha256(bytes(size)).hexdigest(), overwrite)
    assert store.list(BLOBS) == []


def test_one_nodes_file_hides_what_another_has_below_a_folder_of_that_name() -> None:
    file = StoredFile(sha256="x")
    assert merged({}, {0: {"a/b": file}, 1: {"a": file}}) == {"a": file}


class _World:
    """Several nodes' uploads and commits, one at a time in any order, and what the sets must be."""

    def __init__(self, store: Bucket) -> None:
        self.store = store
        self.round = 0
        self.model: dict[str, str] = {}
        self.next_round()

    def next_round(self) -> None:
        self.round += 1
        self.nodes = [sets_of(self.store, self.round, rank) for rank in range(3)]
        self.zombies = getattr(self, "nodes_before", [])
        self.nodes_before = self.nodes
        self.waiting: dict[int, tuple[Changes, dict[str, str]]] = {}
        self.base = dict(self.model)
        self.told: dict[int, dict[str, str | None]] = {}
        for node in self.nodes:
            assert {path: self.read(file) for path, file in node.begin().items()} == self.base

    def read(self, file: StoredFile) -> str:
        data = self.store.get(f"{BLOBS}/{file.blob}")
        assert data is not None, "a set names a blob that is gone"
        return data.decode()

    def upload(self, rank: int, texts: dict[str, str | None]) -> None:
        node = self.nodes[rank]
        changes = {path: None if text is None else stored(node, text) for path, text in texts.items()}
        self.waiting[rank] = (changes, {path: text for path, text in texts.items() if text is not None})

    def commit(self, rank: int) -> None:
        if rank in self.waiting:
            changes, texts = self.waiting.pop(rank)
            commit(self.nodes[rank], changes, texts)
            self.told[rank] = {path: texts.get(path) for path in changes}
            self.model = dict(self.base)
            for low in sorted(self.told, reverse=True):
                for path, text in self.told[low].items():
                    self.model.pop(path, None)
                    if text is not None:
                        self.model[path] = text

    def check(self) -> None:
        log = ledgers.files(self.store, JOB).read().value
        assert log is not None
        for name in snapshot_log._blobs(log):
            assert self.store.get(f"{BLOBS}/{name}") is not None, "a set names a blob that is gone"
        assert {path: data.decode() for path, data in content(self.store).items() if data} == self.model
        for zombie in self.zombies:
            with pytest.raises(Fenced):
                zombie.commit({})


_TEXTS = st.dictionaries(st.sampled_from("abc"), st.sampled_from(["1", "2", "3", None]), max_size=3)
_STEPS = st.one_of(
    st.tuples(st.just("upload"), st.integers(0, 2), _TEXTS),
    st.tuples(st.just("commit"), st.integers(0, 2), st.none()),
    st.tuples(st.just("commit"), st.integers(0, 2), st.none()),
    st.tuples(st.just("round"), st.just(0), st.none()),
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.lists(_STEPS, max_size=25))
def test_no_order_of_uploads_commits_and_rounds_loses_a_blob_that_a_set_needs(
    steps: list[tuple[str, int, dict[str, str | None] | None]],
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        world = _World(open_bucket(Path(folder).as_uri()))
        for what, rank, texts in steps:
            if what == "upload":
                world.upload(rank, texts or {})
            elif what == "commit":
                world.commit(rank)
            else:
                world.next_round()
            world.check()
