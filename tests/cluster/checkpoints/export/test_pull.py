"""Files that appear whole or not at all, and what a script has kept."""

from __future__ import annotations

import errno
import hashlib
import io
import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpuctl.cluster import layout
from gpuctl.cluster.checkpoints import listing
from gpuctl.cluster.checkpoints.commit_log import CommitLog
from gpuctl.cluster.checkpoints.export import pull
from gpuctl.cluster.checkpoints.manifest import Part, Piece, blocks_of, digest
from gpuctl.cluster.checkpoints.retention import Retention
from gpuctl.cluster.clock import SystemClock
from gpuctl.cluster.errors import BadInput, CorruptRecord, Damaged, GpuctlError
from gpuctl.cluster.records.snapshots import Snapshot, StoredFile
from gpuctl.cluster.snapshots import snapshot_log
from gpuctl.cluster.snapshots.snapshot_log import SnapshotLog
from gpuctl.cluster.storage.bucket import open_bucket
from tests.fakes.checkpoints import Maker


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_files_appear_at_the_end_and_all_at_once(tmp_path: Path) -> None:
    out = tmp_path / "a" / "b"
    with pull.new_files(out, 10) as aside:
        (aside / "model.pt").write_bytes(b"weights")
        (aside / ".metadata").write_bytes(b"index")
        assert names(out) == [aside.name]
    assert names(out) == [".metadata", "model.pt"]


@pytest.mark.parametrize("there", [True, False], ids=["into an empty folder", "into a new one"])
@pytest.mark.parametrize("failure", [RuntimeError("x"), KeyboardInterrupt()], ids=["failed", "interrupted"])
def test_what_fails_leaves_nothing(tmp_path: Path, failure: BaseException, there: bool) -> None:
    out = tmp_path / "out"
    if there:
        out.mkdir()
    with pytest.raises(type(failure)), pull.new_files(out, 10) as aside:
        (aside / "model.pt").write_bytes(b"half")
        raise failure
    assert names(tmp_path) == (["out"] if there else [])
    assert not there or names(out) == []


def test_what_a_killed_pull_left_is_no_obstacle(tmp_path: Path) -> None:
    with pull.new_files(tmp_path / "out", 0) as aside:
        left = aside.name
    (tmp_path / "out" / left).mkdir()
    (tmp_path / "out" / left / "model.pt").write_bytes(b"half")
    with pull.new_files(tmp_path / "out", 0) as aside:
        assert names(aside) == []
    assert names(tmp_path / "out") == []


def test_nothing_is_ever_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(BadInput, match=r"is not empty; choose a new folder"), pull.new_files(tmp_path, 0):
        pass
    assert names(tmp_path) == ["mine"]


@pytest.mark.parametrize("place", ["file", "file/below", "/proc/gpuctl"])
def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(BadInput, match=r"cannot write to .*; choose another folder"),
        pull.new_files(tmp_path / place, 0),
    ):
        pass
    assert names(tmp_path) == ["file"]


def test_a_disk_without_room_is_refused_before_anything_is_fetched(tmp_path: Path) -> None:
    with (
        pytest.raises(GpuctlError, match=r"no space in .*: 1000000000000.0 MB are needed and \d+.\d MB are free"),
        pull.new_files(tmp_path / "out", 10**18),
    ):
        raise AssertionError("not reached")
    assert names(tmp_path) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fills_meanwhile_is_told_as_such(tmp_path: Path, number: int) -> None:
    with pytest.raises(GpuctlError, match="no space in"), pull.new_files(tmp_path / "out", 0):
        raise OSError(number, os.strerror(number))
    assert names(tmp_path) == []


@pytest.mark.parametrize("item", ["model", "../../etc/passwd", "a/b", "", "..", ".hidden", "ünï\0code"])
def test_no_name_of_an_item_leads_out_of_the_folder(tmp_path: Path, item: str) -> None:
    path = tmp_path / f"{pull.file_name(item)}.pt"
    path.write_text("")
    assert path.parent == tmp_path
    assert names(tmp_path) == [path.name]


@pytest.mark.parametrize("document", [b"{", b'{"kind": "dict"}', b'{"of": 1}', b"\xff", b"[" * 100_000])
def test_what_is_no_skeleton_is_damage(file_url: str, document: bytes) -> None:
    """Whoever may write to the bucket may write this, with all digests right."""
    store = open_bucket(file_url)
    maker = Maker(listing.folder(store, "job"))
    manifest, _ = maker.write(1, {"model": 1}, 1)
    blocks = tuple(digest(document[low:high]) for low, high in blocks_of(len(document)))
    maker.store.put("forged", document)
    forged = replace(
        manifest,
        parts=(*manifest.parts, Part("forged", len(document), blocks)),
        values={"@plain.model": (Piece(len(manifest.parts), 0, len(document)),)},
    )
    commits = CommitLog(maker.store, 1, Retention())
    commits.begin()
    entry = commits.commit(replace(maker.save(1, {}, attempt=2), step=2, path="2-r1.x"), forged)
    with pytest.raises(Damaged, match="the checkpoint's record of 'model' is invalid"):
        pull.open_entry(store, "job", entry)


# -- what a script has kept -------------------------------------------------------------------------------------------


def keep(url: str, files: dict[str, bytes], links: dict[str, str], job: str = "job") -> Snapshot:
    sets = SnapshotLog(open_bucket(url), job, 1, 0, SystemClock())
    sets.begin()
    changes: dict[str, StoredFile | None] = {path: StoredFile(link=target) for path, target in links.items()}
    for path, data in files.items():
        sha256 = hashlib.sha256(data).hexdigest()
        source = io.BufferedReader(io.BytesIO(data))
        blob = sets.upload(source, len(data), sha256, lambda: None)
        changes[path] = StoredFile(size=len(data), sha256=sha256, blob=blob, modified_ns=1_700_000_000_000_000_000)
    assert sets.commit(changes) == []
    found = snapshot_log.newest(open_bucket(url), job)
    assert found is not None
    return found


def test_the_files_of_a_script_come_back_with_their_times_and_links(tmp_path: Path, bucket_url: str) -> None:
    large = bytes(range(256)) * 50_000
    files = keep(
        bucket_url, {"epoch=1.ckpt": large, "version_0/hparams.yaml": b"lr: 1", "empty": b""}, {"last": "epoch=1.ckpt"}
    )
    told: list[int] = []
    pull.fetch_files(open_bucket(bucket_url), "job", files, tmp_path, told.append)
    assert (tmp_path / "last").read_bytes() == large
    assert (tmp_path / "last").readlink() == Path("epoch=1.ckpt")
    assert (tmp_path / "version_0" / "hparams.yaml").read_bytes() == b"lr: 1"
    assert (tmp_path / "empty").stat().st_mtime == 1_700_000_000
    assert sum(told) == len(large) + 5


def test_a_file_that_is_damaged_is_named(tmp_path: Path, file_url: str) -> None:
    files = keep(file_url, {"a": b"good"}, {})
    key = f"{layout.files('job')}/blobs/{files.files['a'].blob}"
    open_bucket(file_url).put(key, b"evil")
    with pytest.raises(CorruptRecord, match=r"is damaged: .*; gpuctl ckpt verify files --job job shows"):
        pull.fetch_files(open_bucket(file_url), "job", files, tmp_path / "out", lambda _: None)


def test_files_that_the_job_replaces_while_they_are_pulled_are_not_called_damaged(
    tmp_path: Path, file_url: str
) -> None:
    files = keep(file_url, {"a": b"a1", "b": b"b1"}, {})
    newer = [b"2", b"3"]

    def go_on(_: int) -> None:
        while newer:
            text = newer.pop(0)
            keep(file_url, {"a": b"a" + text, "b": b"b" + text}, {})

    with pytest.raises(GpuctlError, match="the files of job were replaced meanwhile; pull the newer ones"):
        pull.fetch_files(open_bucket(file_url), "job", files, tmp_path, go_on)


@pytest.mark.parametrize(
    ("path", "link"),
    [("../evil", ""), ("/evil", ""), ("a/../../evil", ""), ("link", "../.."), ("link", "/etc"), (".", "x")],
)
def test_no_file_of_a_script_leads_out_of_the_folder(tmp_path: Path, file_url: str, path: str, link: str) -> None:
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(CorruptRecord, match="outside of the folder"):
        pull.fetch_files(
            open_bucket(file_url), "job", Snapshot(round=1, files={path: StoredFile(link=link)}), out, lambda _: None
        )
    assert names(out) == []
