"""A folder and a set of files that it is to be equal to."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuctl.bootstrap.mirror.watched_folder import WatchedFolder
from gpuctl.cluster.errors import GpuctlError
from gpuctl.cluster.records.snapshots import StoredFile


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], capture_output=True)
    if done.returncode != 0:
        pytest.skip("a small disk needs root and Linux")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_set_that_does_not_fit_leaves_the_disk_and_the_folder_as_they_were(small_disk: Path) -> None:
    folder = WatchedFolder(small_disk / "checkpoints")
    folder.path.mkdir()
    (folder.path / "old").write_text("old")
    files = {f"{number}": StoredFile(size=400_000, sha256=f"{number}", blob="x") for number in range(3)}

    def fetch(file: StoredFile, path: Path) -> None:
        path.write_bytes(bytes(file.size))

    with pytest.raises(GpuctlError, match=r"no space for the job's files .*: 1\.2 MB needed; use machines"):
        folder.make_equal(files, fetch)
    assert [path.name for path in small_disk.rglob("*")] == ["checkpoints", "old"]


def test_what_could_not_be_fetched_is_not_left_behind(tmp_path: Path) -> None:
    def fetch(_file: StoredFile, path: Path) -> None:
        path.write_bytes(b"half")
        raise GpuctlError("no more than that")

    with pytest.raises(GpuctlError, match="no more than that"):
        WatchedFolder(tmp_path / "checkpoints").make_equal({"a": StoredFile(size=5, sha256="a", blob="x")}, fetch)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_listed_is_no_empty_one(tmp_path: Path) -> None:
    folder = WatchedFolder(tmp_path / "checkpoints")
    assert folder.scan() == {}, "not made yet"
    (folder.path / "a").mkdir(parents=True)
    (folder.path / "a" / "model").write_text("x")
    assert list(folder.scan()) == ["a/model"]
    below = Path(*["d" * 254] * 16)
    made = subprocess.run(["mkdir", "-p", below], cwd=folder.path, timeout=20)
    assert made.returncode == 0
    with pytest.raises(OSError, match="File name too long"):
        folder.scan()
