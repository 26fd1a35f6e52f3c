"""Checkpoints listed, fetched and deleted from outside of the job."""

from __future__ import annotations

import json

import pytest

from gpuctl.cluster import checkpoints, layout
from gpuctl.cluster.bucket import Bucket
from gpuctl.cluster.records import CheckpointLog
from tests.cli.written import WrittenCluster

FILES = {"index.json": b"{}", "tensors-0-0.bin": bytes(range(256)) * 70_000, "empty.bin": b""}


@pytest.fixture
def saved(written_anywhere: WrittenCluster) -> WrittenCluster:
    job = written_anywhere.submit().job
    written_anywhere.checkpoint(job, 100, {"index.json": b"old"})
    written_anywhere.checkpoint(job, 200, FILES, 3)
    return written_anywhere


def keys(cluster: WrittenCluster, step: str) -> list[str]:
    return [entry.key for entry in cluster.store.list(f"{layout.checkpoints('digits-1')}/{step}")]


def test_ls_lists_what_is_committed(saved: WrittenCluster) -> None:
    saved.store.put(f"{layout.checkpoints('digits-1')}/300-r3/index.json", b"not committed")
    listed = json.loads(saved.run("ckpt", "ls", "-o", "json").stdout)
    assert [(entry["step"], entry["round"]) for entry in listed] == [(100, 1), (200, 3)]
    lines = saved.run("ckpt", "ls", "--job", "digits-1").stdout.splitlines()
    assert lines[0].split() == ["STEP", "ROUND", "RANKS", "FILES", "SIZE", "SAVED"]
    assert lines[2].split()[:6] == ["200", "3", "2", "3", "17.9", "MB"]


@pytest.mark.parametrize("step", ["200", "last"])
def test_pull_fetches_the_files_as_they_are(saved: WrittenCluster, step: str) -> None:
    done = saved.run("ckpt", "pull", step, "out/here")
    assert done.stdout == "out/here\n"
    there = {path.name: path.read_bytes() for path in (saved.work / "out" / "here").iterdir()}
    assert there == FILES
    assert "step 200 of digits-1: 17.9 MB" in done.stderr


@pytest.mark.parametrize("harm", ["changed", "missing"])
def test_a_damaged_checkpoint_is_named_and_leaves_no_bad_file(saved: WrittenCluster, harm: str) -> None:
    key = f"{layout.checkpoints('digits-1')}/200-r3/tensors-0-0.bin"
    if harm == "changed":
        saved.store.put(key, FILES["tensors-0-0.bin"][:-1] + b"!")
    else:
        saved.store.delete([key])
    done = saved.run("ckpt", "pull", "200", "out", code=1)
    assert "tensors-0-0.bin" in done.stderr
    assert not [path for path in (saved.work / "out").iterdir() if path.name.startswith("tensors")]


def test_pull_into_a_file_is_refused(saved: WrittenCluster) -> None:
    (saved.work / "out").write_text("")
    assert "error: cannot write to out" in saved.run("ckpt", "pull", "200", "out", code=2).stderr


def test_a_step_that_is_not_there_is_refused_with_those_that_are(saved: WrittenCluster) -> None:
    for verb in (["pull", "7", "out"], ["rm", "7", "-y"]):
        said = saved.run("ckpt", *verb, code=2).stderr
        assert said == "error: job digits-1 has no checkpoint of step 7; it has: 100, 200\n"


def test_rm_deletes_one_and_keeps_the_fence_and_the_others(saved: WrittenCluster) -> None:
    ledger = checkpoints.ledger(saved.store, "digits-1")
    fence = (ledger.read().value or CheckpointLog()).fence
    assert saved.run("ckpt", "rm", "200", "-y").stdout.startswith("deleted 1 checkpoint of digits-1 (17.9 MB)")
    log = ledger.read().value
    assert log is not None
    assert [entry.step for entry in log.entries] == [100]
    assert log.fence == fence
    assert keys(saved, "200-r3") == []
    assert len(keys(saved, "100-r1")) == 1
    saved.run("ckpt", "rm", "all", "-y")
    assert "job digits-1 has no checkpoint" in saved.run("ckpt", "ls").stderr


def test_rm_asks_and_without_anybody_to_ask_does_nothing(saved: WrittenCluster) -> None:
    assert "nothing was deleted; answer y, or add -y" in saved.run("ckpt", "rm", "200", code=1).stderr
    assert len(keys(saved, "200-r3")) == 3


class Watching(Bucket):
    """What the ledger said when the first file was deleted."""

    entries_then: tuple[object, ...] | None = None

    def delete(self, keys: object) -> None:
        if self.entries_then is None:
            self.entries_then = checkpoints.committed(self, "digits-1")
        super().delete(keys)  # type: ignore[arg-type]


def test_the_log_forgets_a_checkpoint_before_its_files_go(saved: WrittenCluster) -> None:
    store = Watching(saved.store.raw, saved.url)
    entries = checkpoints.committed(store, "digits-1")
    checkpoints.remove(store, "digits-1", entries)
    assert store.entries_then == ()


def test_removing_while_the_job_commits_loses_none_of_its_checkpoints(saved: WrittenCluster) -> None:
    first = checkpoints.committed(saved.store, "digits-1")[:1]

    class Racing(Bucket):
        raced = False

        def create(self, key: str, data: bytes) -> bool:
            if not self.raced:
                self.raced = True
                saved.checkpoint("digits-1", 300, {"index.json": b"new"}, 3)
            return super().create(key, data)

    checkpoints.remove(Racing(saved.store.raw, saved.url), "digits-1", first)
    assert [entry.step for entry in checkpoints.committed(saved.store, "digits-1")] == [200, 300]
    assert keys(saved, "100-r1") == []
